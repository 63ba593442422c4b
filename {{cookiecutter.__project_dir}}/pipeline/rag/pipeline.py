"""Documents to vectors on many nodes: Ray tasks read and cut, Ray actors embed, and little waits between them."""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray import ObjectRef

from pipeline.data.files import InputFiles
from pipeline.rag import documents
from pipeline.rag.documents import Batch, Chunker
from pipeline.rag.embedder import Embedder

AHEAD = 2  # batches with each worker: one in work, one that waits
READ_AHEAD = 2  # batches of each reading task that nobody has taken yet


class Embedded(NamedTuple):
    """A batch, its chunks with their vectors."""

    seen: list[str]
    changed: list[str]
    chunks: pa.Table
    size: int


class Worker(Embedder):
    """The actor."""

    def work(self, batch: Batch) -> Embedded:
        """The batch with a vector for each chunk."""
        vectors = pa.array(self.embed(batch.chunks["text"].to_pylist()).ravel(), pa.float32())
        dimension = len(vectors) // len(batch.chunks)
        column = pa.FixedSizeListArray.from_arrays(vectors, dimension)
        return Embedded(batch.seen, batch.changed, batch.chunks.append_column("vector", column), batch.size)


class Pool:
    """Workers that start when there is something to do, each with its own copy of the model."""

    def __init__(self, count: int, resources: dict[str, float], *arguments: Any) -> None:
        """`arguments` are the `Embedder`'s."""
        self._count = count
        # a worker that dies with its machine is started again on another, and does again what it had not done
        self._kind = ray.remote(Worker).options(max_restarts=-1, max_task_retries=3, **resources)
        self._arguments = arguments
        self._actors: list[Any] = []

    @property
    def actors(self) -> list[Any]:
        if not self._actors:
            self._actors = [self._kind.remote(*self._arguments) for _ in range(self._count)]
        return self._actors

    def embed(self, batches: Iterator[ObjectRef]) -> Iterator[Embedded]:
        """The batches, as they become ready."""
        free: deque[Any] = deque()
        working: dict[ObjectRef, Any] = {}
        for reference in batches:
            batch: Batch = ray.get(reference)
            if not batch.chunks:
                yield Embedded(*batch)
                continue
            if not free and not working:
                free.extend(self.actors * AHEAD)
            if not free:
                yield self._next(working, free)
            actor = free.popleft()
            working[actor.work.remote(reference)] = actor
        while working:
            yield self._next(working, free)

    def _next(self, working: dict[ObjectRef, Any], free: deque[Any]) -> Embedded:
        [done], _ = ray.wait(list(working), num_returns=1)
        free.append(working.pop(done))
        return ray.get(done)


def read(source: InputFiles, known: dict[str, str], cut: Chunker, size: int, at_once: int) -> Iterator[ObjectRef]:
    """References to the source's batches, of about `size` chunks, that `at_once` tasks make; each task in its turn."""
    task = ray.remote(documents.batches).options(
        num_returns="streaming", _generator_backpressure_num_objects=READ_AHEAD, max_retries=-1
    )
    shared = ray.put(known)
    shared_cut = ray.put(cut)
    waiting = deque(documents.pieces(source))
    running: list[Any] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(task.remote(source, waiting.popleft(), shared, shared_cut, size))
        [ready], running = ray.wait(running, num_returns=1)
        try:
            yield next(ready)
        except StopIteration:
            continue
        running.append(ready)
