"""One embedding model, loaded once: texts to vectors of length one, as sentence-transformers makes them."""

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

from pipeline.ray_support import model_cache
from settings import UserError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Embedder:
    """The model, on one device."""

    def __init__(self, model: str, device: str, precision: Literal["fp32", "bf16"], batch_chunks: int = 32) -> None:
        """`model` is what `weights.find` gives; `batch_chunks` are the texts in one forward pass."""
        logging.disable_progress_bar()
        folder = model_cache.on_this_node(model)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder, dtype=PRECISIONS[precision]).to(device).eval()
        self._longest = min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings)
        self._pooling = _described(folder, "1_Pooling/config.json")
        self._prompts = _described(folder, "config_sentence_transformers.json").get("prompts", {})
        self._batch_chunks = batch_chunks

    def embed(self, texts: Sequence[str], kind: Literal["query", "document"] = "document") -> np.ndarray:
        """A row of float32 for each text; some models want to be told of which kind the texts are."""
        prompt = self._prompts.get(kind, "")
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # little padding in a batch
        vectors = np.empty((len(texts), self._model.config.hidden_size), np.float32)
        for first in range(0, len(order), self._batch_chunks):
            numbers = order[first : first + self._batch_chunks]
            vectors[numbers] = self._forward([prompt + texts[number] for number in numbers])
        return vectors

    @torch.inference_mode()
    def _forward(self, texts: list[str]) -> np.ndarray:
        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=self._longest, return_tensors="pt")
        batch = batch.to(self._model.device)
        states = self._model(**batch).last_hidden_state
        pooled = self._pool(states, batch["attention_mask"])
        return functional.normalize(pooled.float(), dim=1).cpu().numpy()

    def _pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._pooling.get("pooling_mode_cls_token"):
            return states[:, 0]
        if self._pooling.get("pooling_mode_lasttoken"):
            last = mask.shape[1] - 1 - mask.flip(1).argmax(1)  # whichever side the padding is on
            return states[torch.arange(len(states), device=states.device), last]
        return (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


class Described:
    """What of a model the driver needs, without its weights."""

    def __init__(self, model: str) -> None:
        """Raises: `UserError` when there is no such model."""
        folder = model_cache.on_this_node(model, weights=False)
        try:
            self.dimension: int = AutoConfig.from_pretrained(folder).hidden_size
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{model} cannot be read ({str(error).splitlines()[0]}): set model in [embed] of settings.toml to an "
                "embedding model; inv demo writes one to models/embedder."
            ) from None
        self.tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()


def _described(folder: str, file: str) -> dict[str, Any]:
    """What a model's folder says about how its vectors are made; empty where it does not."""
    try:
        return json.loads(Path(cached_file(folder, file)).read_text(encoding="utf-8"))
    except OSError:
        return {}
