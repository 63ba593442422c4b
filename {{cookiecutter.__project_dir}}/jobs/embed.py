"""Embeds documents into an index that `serve_rag` answers from; again, and only what has changed is embedded.

A document is known by its id and a hash of its text. One that is no longer among the input's is removed.
"""

from pipeline.rag.options import EmbedOptions
from pipeline.ray_support import cli

if __name__ == "__main__":
    cli.parse(EmbedOptions, "embed")  # before the imports below, which take seconds

import json
import time
from collections import Counter
from typing import Any

import pyarrow as pa
import ray
import torch
from ray.exceptions import RayTaskError

import settings
from pipeline.rag import documents, index, pipeline, ranking
from pipeline.rag.documents import Chunker
from pipeline.rag.embedder import EmbeddingModelInfo
from pipeline.ray_support import capacity, model_cache
from pipeline.ray_support.progress import Progress, time_left
from pipeline.training import storage
from settings import UserError

PASSES = 4  # forward passes in a batch: fewer, and its way to the worker costs; more, and the last worker is waited for
COMMIT_S = 10.0  # so much work is lost at most when the job is killed
CANDIDATES, SHOWN = 20, 5  # chunks found for a question, and those of them that count as a hit


def main(options: EmbedOptions) -> None:
    """Cut documents into chunks, embed these, and keep them with their vectors in an index to search."""
    source = documents.find(settings.resolve(options.input))
    questions = _questions(options.questions)
    model = model_cache.find(options.model)
    described = EmbeddingModelInfo(model)
    location = settings.resolve(options.index)
    cli.connect()
    _check_cluster(options, model, location)
    recipe = index.IndexConfig(options.model, options.chunk_tokens, options.chunk_overlap)
    writer = index.Writer(location, options.input, recipe, described.dimension, fresh=options.fresh)
    resources = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
    pool = pipeline.WorkerPool(
        options.num_workers, resources, model, options.device, options.precision, options.batch_chunks
    )
    cut = Chunker(described.tokenizer, options.chunk_tokens, options.chunk_overlap)
    counts = _embed(source, writer, pool, cut, options)
    print(
        "documents: " + ", ".join(f"{counts[name]:,} {name}" for name in ("new", "changed", "removed", "unchanged")),
        f"{writer.finish():,} chunks are in {location}",
        sep="\n",
        flush=True,
    )
    if questions:
        _show_hit_rate(questions, pool, location)
    print("next: inv submit serve_rag", flush=True)


def _check_cluster(options: EmbedOptions, model: str, location: str) -> None:
    capacity.refuse_too_many_workers(options.num_workers, options.needs, "num_cpus and num_gpus in [embed]")
    reader = {"CPU": options.num_cpus * options.num_workers + 1}
    if sum(node.count * node.resources.get("CPU", 0) for node in capacity.nodes()) < reader["CPU"]:
        raise UserError(
            f"{options.num_workers} workers leave no CPU to read the documents with: use a smaller --num-workers, or "
            "a smaller num_cpus in [embed]."
        )
    paths = {"input": settings.resolve(options.input), "index": location, "model": model}
    capacity.refuse_private_paths(paths, options.shared_paths, "embed")


def _embed(
    source: documents.Source, writer: index.Writer, pool: pipeline.WorkerPool, cut: Chunker, options: EmbedOptions
) -> Counter[str]:
    """Embed what is new or changed, and remove what is gone; returns how many documents are what."""
    known = writer.known()
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    size = PASSES * options.batch_chunks
    batches = pipeline.read(source, known, cut, size, options.num_workers)
    waiting = Commits(writer)
    with Progress(_Line(source.size)) as progress:
        try:
            for batch in pool.embed(batches):
                _refuse_twice(batch.seen, seen)
                waiting.add(batch)
                new = len(set(batch.seen) - known.keys())
                counts.update(new=new, changed=len(batch.changed))
                progress.report(documents=len(batch.seen), chunks=len(batch.chunks), bytes_read=batch.size)
        except RayTaskError as error:
            raise _explained(error, options) from None
        finally:
            waiting.commit()
    gone = known.keys() - seen
    writer.remove(gone)
    counts.update(removed=len(gone), unchanged=len(seen) - counts["new"] - counts["changed"])
    return counts


def _explained(error: RayTaskError, options: EmbedOptions) -> Exception:
    """What to tell a person about a task that failed: one sentence where a document or a GPU's memory is at fault."""
    if isinstance(error.cause, UserError):
        return UserError(str(error.cause).splitlines()[0])  # Ray adds advice of its own in the lines below
    if isinstance(error.cause, torch.OutOfMemoryError):
        return UserError(
            f"a GPU has no room for {options.batch_chunks} chunks in one forward pass; pass a smaller --batch-chunks."
        )
    return error


def _refuse_twice(ids: list[str], seen: set[str]) -> None:
    """Note the ids, and refuse one that two documents have."""
    for name in ids:
        if name in seen:
            raise UserError(f"two documents have the id {name}: give each its own, or leave the ids out.")
        seen.add(name)


class Commits:
    """Batches on their way into the index: each commit is a new version of it, so one takes many of them."""

    def __init__(self, writer: index.Writer) -> None:
        self._writer = writer
        self._batches: list[pipeline.EmbeddedBatch] = []
        self._since = time.monotonic()

    def add(self, batch: pipeline.EmbeddedBatch) -> None:
        if len(batch.chunks):
            self._batches.append(batch)
        if time.monotonic() - self._since > COMMIT_S:
            self.commit()

    def commit(self) -> None:
        """Commit what there is."""
        if self._batches:
            chunks = pa.concat_tables(batch.chunks for batch in self._batches)
            self._writer.commit(chunks, [name for batch in self._batches for name in batch.changed])
        self._batches = []
        self._since = time.monotonic()


class _Line:
    """The progress line."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waited_s = 0.0

    def __call__(self, totals: dict[str, int], seconds: float) -> str:
        if not totals:
            self._waited_s = seconds
            return f"starting workers: {seconds:.0f} s"
        seconds -= self._waited_s
        left = time_left(totals["bytes_read"], self._size, seconds)
        speed = totals["chunks"] / seconds
        return f"{totals['documents']:,} documents, {totals['chunks']:,} chunks, {speed:,.0f} chunks/s, {left}"


def _questions(file: str) -> list[dict[str, Any]]:
    if not file:
        return []
    text = storage.read_text(settings.resolve(file))
    if text is None:
        raise UserError(f"there is no file {settings.resolve(file)}; correct questions in [embed], or leave it empty.")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _show_hit_rate(questions: list[dict[str, Any]], pool: pipeline.WorkerPool, location: str) -> None:
    """How often the right document is among the first, by the vectors alone and in the plain ranking."""
    texts = [row["question"] for row in questions]
    vectors = ray.get(pool.actors[0].embed.remote(texts, "query"))
    found = index.search_all(location, vectors, CANDIDATES)
    ranked = [ranking.rank(text, chunks) for text, chunks in zip(texts, found, strict=True)]
    for name, results in (("by the vectors alone", found), ("ranked", ranked)):
        hits = [
            row["document"] in [chunk.document for chunk in chunks[:SHOWN]]
            for row, chunks in zip(questions, results, strict=True)
        ]
        print(f"hit rate at {SHOWN}, {name}: {sum(hits) / len(hits):.0%} of {len(hits)} questions", flush=True)


if __name__ == "__main__":
    cli.run(main)
