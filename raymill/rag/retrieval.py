"""The deployments that find sources for a question: retriever and reranker, which can use a cross-encoder.

A cross-encoder reads a question and a chunk together. This is slower than comparing vectors, but more accurate.
"""

import asyncio
from collections.abc import Callable

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from raymill.model_config import text_config
from raymill.rag import ranking
from raymill.rag.answers import ScoredChunk
from raymill.rag.embedder import Embedder
from raymill.rag.index import Reader
from raymill.ray_support import model_cache
from raymill.training import weights_check


class Retriever:
    """Finds the chunks that match a question, by meaning or by words, in the latest version of the index."""

    async def __init__(self, location: str, device: str, candidates: int) -> None:
        self._reader = await Reader.open(location)
        model = await asyncio.to_thread(model_cache.find, self._reader.config.model)
        self._embedder = await asyncio.to_thread(Embedder, model, device, "fp32")
        self._candidates = candidates

    async def find(self, question: str) -> list[ScoredChunk]:
        [vector] = await asyncio.to_thread(self._embedder.embed, [question], "query")
        return await self._reader.search(vector, self._candidates, question)


class Reranker:
    """Ranks the chunks that the retriever found."""

    def __init__(self, model: str, device: str) -> None:
        self._rank: Callable[[str, list[ScoredChunk]], list[ScoredChunk]] = ranking.rank
        if model:
            self._rank = CrossEncoder(model_cache.find(model), device).rank

    async def rank(self, question: str, chunks: list[ScoredChunk]) -> list[ScoredChunk]:
        return await asyncio.to_thread(self._rank, question, chunks)


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
