"""Embeds documents on many nodes: Ray tasks read and chunk them, and Ray actors embed the chunks.

Only a few batches wait between the tasks and the actors, which limits memory use.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray import ObjectRef

from raymill.data.files import InputFiles
from raymill.rag import documents
from raymill.rag.chunking import Chunker
from raymill.rag.documents import Batch, Problem
from raymill.rag.embedder import Embedder

BATCHES_PER_WORKER = 2  # one in progress, one waiting
MAX_UNREAD_BATCHES = 2  # a reading task pauses while this many of its batches wait


class EmbeddedBatch(NamedTuple):
    """A batch whose chunks have a `vector` column."""

    seen: list[str]
    changed: list[str]
    chunks: pa.Table
    size: int
    problems: list[Problem]


class EmbeddingWorker(Embedder):
    """A Ray actor that embeds batches."""

    def embed_batch(self, batch: Batch) -> EmbeddedBatch:
        """Return the batch with a vector for each chunk."""
        vectors = pa.array(self.embed(batch.chunks["text"].to_pylist()).ravel(), pa.float32())
        dimension = len(vectors) // len(batch.chunks)
        column = pa.FixedSizeListArray.from_arrays(vectors, dimension)
        return EmbeddedBatch(*batch)._replace(chunks=batch.chunks.append_column("vector", column))


class WorkerPool:
    """Workers with one copy of the model each. They start when they are first needed."""

    def __init__(self, count: int, resources: dict[str, float], *arguments: Any) -> None:
        """`resources` are what each worker reserves; `arguments` are passed to `Embedder`."""
        self._count = count
        # if a worker's machine dies, Ray restarts the worker on another one and repeats its unfinished batches
        self._actor_class = ray.remote(EmbeddingWorker).options(max_restarts=-1, max_task_retries=3, **resources)
        self._arguments = arguments
        self._actors: list[Any] = []

    @property
    def actors(self) -> list[Any]:
        if not self._actors:
            self._actors = [self._actor_class.remote(*self._arguments) for _ in range(self._count)]
        return self._actors

    def embed(self, batches: Iterator[ObjectRef]) -> Iterator[EmbeddedBatch]:
        """Yield the embedded batches in the order in which they finish."""
        free: deque[Any] = deque()
        working: dict[ObjectRef, Any] = {}
        for reference in batches:
            batch: Batch = ray.get(reference)
            if not batch.chunks:
                yield EmbeddedBatch(*batch)
                continue
            if not free and not working:
                free.extend(self.actors * BATCHES_PER_WORKER)
            if not free:
                yield self._next(working, free)
            actor = free.popleft()
            working[actor.embed_batch.remote(reference)] = actor
        while working:
            yield self._next(working, free)

    def _next(self, working: dict[ObjectRef, Any], free: deque[Any]) -> EmbeddedBatch:
        [done], _ = ray.wait(list(working), num_returns=1)
        free.append(working.pop(done))
        return ray.get(done)


def read(source: InputFiles, known: dict[str, str], cut: Chunker, size: int, max_tasks: int) -> Iterator[ObjectRef]:
    """Yield references to batches of about `size` chunks. At most `max_tasks` tasks read at the same time."""
    task = ray.remote(documents.batches).options(
        num_returns="streaming", _generator_backpressure_num_objects=MAX_UNREAD_BATCHES, max_retries=-1
    )
    shared = ray.put(known)
    shared_cut = ray.put(cut)
    waiting = deque(documents.pieces(source))
    running: list[Any] = []
    while waiting or running:
        while waiting and len(running) < max_tasks:
            running.append(task.remote(source, waiting.popleft(), shared, shared_cut, size))
        [ready], running = ray.wait(running, num_returns=1)
        try:
            yield next(ready)
        except StopIteration:
            continue
        running.append(ready)
