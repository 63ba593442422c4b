"""The deployments that find sources for a question: retriever and reranker.

They import the models' code late, because `serve_rag` only names these classes.
"""

import asyncio
from collections.abc import Callable

from raymill.rag import ranking
from raymill.rag.answers import ScoredChunk
from raymill.rag.index import Reader
from raymill.ray_support import model_cache


class Retriever:
    """Finds the chunks that match a question, by meaning or by words, in the latest version of the index."""

    async def __init__(self, location: str, device: str, candidates: int) -> None:
        from raymill.rag.embedder import Embedder

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
            from raymill.rag.cross_encoder import CrossEncoder

            self._rank = CrossEncoder(model_cache.find(model), device).rank

    async def rank(self, question: str, chunks: list[ScoredChunk]) -> list[ScoredChunk]:
        return await asyncio.to_thread(self._rank, question, chunks)
