"""A cross-encoder reads a question and a chunk together: slower than comparing vectors, but more accurate."""

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from raymill.model_config import text_config
from raymill.rag.answers import ScoredChunk
from raymill.ray_support import model_cache
from raymill.training import weights_check


def check(model: str) -> None:
    """Raise UserError if the files of a model lack weights of a cross-encoder. `model` is from `model_cache.find`."""
    weights_check.check(model, AutoModelForSequenceClassification)


class CrossEncoder:
    """A cross-encoder on one device."""

    def __init__(self, model: str, device: str) -> None:
        """`model` is a location from `model_cache.find`."""
        logging.disable_progress_bar()
        folder = model_cache.on_this_node(model)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForSequenceClassification.from_pretrained(folder).to(device).eval()
        longest = text_config(self._model.config).max_position_embeddings
        self._max_tokens = min(self._tokenizer.model_max_length, longest)

    @torch.inference_mode()
    def rank(self, question: str, chunks: list[ScoredChunk]) -> list[ScoredChunk]:
        """Return the chunks, best first, with the model's scores between 0 and 1."""
        pairs = [(question, chunk.text) for chunk in chunks]
        batch = self._tokenizer(pairs, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt")
        scores = self._model(**batch.to(self._model.device)).logits[:, 0].float().sigmoid().tolist()
        scored = [chunk._replace(score=score) for chunk, score in zip(chunks, scores, strict=True)]
        return sorted(scored, key=lambda chunk: chunk.score, reverse=True)
