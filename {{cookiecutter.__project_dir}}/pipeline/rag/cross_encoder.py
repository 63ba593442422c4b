"""Ranks what the retriever found by a model that reads question and chunk together; slower than vectors, and better."""

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from pipeline.rag.index import Found
from pipeline.ray_support import model_cache


class CrossEncoder:
    """The model."""

    def __init__(self, model: str, device: str) -> None:
        """`model` is what `weights.find` gives."""
        logging.disable_progress_bar()
        folder = model_cache.on_this_node(model)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForSequenceClassification.from_pretrained(folder).to(device).eval()
        self._longest = min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings)

    @torch.inference_mode()
    def rank(self, question: str, found: list[Found]) -> list[Found]:
        """The chunks, the best first; their score is the model's, between 0 and 1."""
        pairs = [(question, chunk.text) for chunk in found]
        batch = self._tokenizer(pairs, padding=True, truncation=True, max_length=self._longest, return_tensors="pt")
        scores = self._model(**batch.to(self._model.device)).logits[:, 0].float().sigmoid().tolist()
        scored = [chunk._replace(score=score) for chunk, score in zip(found, scores, strict=True)]
        return sorted(scored, key=lambda chunk: chunk.score, reverse=True)
