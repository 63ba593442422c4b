"""An embedding model. It embeds texts as vectors of length 1, like sentence-transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import cached_file, logging

from raymill.errors import UserError
from raymill.model_config import text_config
from raymill.ray_support import hub_access, model_cache
from raymill.training import weights_check

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Embedder:
    """An embedding model on one device."""

    def __init__(self, model: str, device: str, precision: Literal["fp32", "bf16"], batch_chunks: int = 32) -> None:
        """Load the model from a location that `model_cache.find` returned. A batch has up to `batch_chunks` texts."""
        logging.disable_progress_bar()
        folder = model_cache.on_this_node(model)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder, dtype=PRECISIONS[precision]).to(device).eval()
        config = text_config(self._model.config)
        self._max_tokens = min(self._tokenizer.model_max_length, config.max_position_embeddings)
        self._pooling = _read_json(folder, "1_Pooling/config.json")
        self._prompts = _read_json(folder, "config_sentence_transformers.json").get("prompts", {})
        self._batch_chunks = batch_chunks

    def embed(self, texts: Sequence[str], kind: Literal["query", "document"] = "document") -> np.ndarray:
        """Return float32 vectors, shape [texts, dimension]. Some models need a prefix that depends on `kind`."""
        prompt = self._prompts.get(kind, "")
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # so that batches need little padding
        vectors = np.empty((len(texts), text_config(self._model.config).hidden_size), np.float32)
        for first in range(0, len(order), self._batch_chunks):
            numbers = order[first : first + self._batch_chunks]
            vectors[numbers] = self._forward([prompt + texts[number] for number in numbers])
        return vectors

    @torch.inference_mode()
    def _forward(self, texts: list[str]) -> np.ndarray:
        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt")
        batch = batch.to(self._model.device)
        states = self._model(**batch).last_hidden_state
        pooled = self._pool(states, batch["attention_mask"])
        return functional.normalize(pooled.float(), dim=1).cpu().numpy()

    def _pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._pooling.get("pooling_mode_cls_token"):
            return states[:, 0]
        if self._pooling.get("pooling_mode_lasttoken"):
            last = mask.shape[1] - 1 - mask.flip(1).argmax(1)  # works with padding on either side
            return states[torch.arange(len(states), device=states.device), last]
        return (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


class EmbeddingModelInfo:
    """Dimension and tokenizer of an embedding model, read without its weights."""

    def __init__(self, model: str) -> None:
        """Read the model's configuration and tokenizer, and check that its files hold its weights.

        Raises:
            UserError: the model cannot be read, or weights are missing.
        """
        folder = model_cache.on_this_node(model, weights=False)
        try:
            self.dimension: int = text_config(AutoConfig.from_pretrained(folder)).hidden_size
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise hub_access.explain(error, model) or UserError(
                f"cannot read {model} ({str(error).splitlines()[0]}): set model in [embed] of settings.toml to an "
                "embedding model. inv demo writes one to models/embedder."
            ) from None
        weights_check.check(model, AutoModel, is_encoder=True)
        self.tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()


def _read_json(folder: str, file: str) -> dict[str, Any]:
    """Return the content of a file of the model, or an empty dict if there is no such file."""
    try:
        return json.loads(Path(cached_file(folder, file)).read_text(encoding="utf-8"))
    except OSError:
        return {}
