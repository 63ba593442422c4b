"""Update an index from an input: embed only new and changed documents, and remove documents that are gone."""

import time
from collections import Counter

import pyarrow as pa
import torch
from ray.exceptions import RayTaskError

from raymill import settings
from raymill.data.files import InputFiles
from raymill.errors import UserError
from raymill.rag import index, pipeline
from raymill.rag.chunking import Chunker
from raymill.rag.options import EmbedOptions
from raymill.rag.problems import ProblemReport
from raymill.ray_support.progress import Progress, time_left

# Forward passes per batch. With fewer, sending batches takes most of the time. With more, all wait for the last worker.
PASSES_PER_BATCH = 4
COMMIT_INTERVAL_S = 10.0  # a killed job loses about this much work


def update_index(
    source: InputFiles, writer: index.Writer, pool: pipeline.WorkerPool, cut: Chunker, options: EmbedOptions
) -> Counter[str]:
    """Embed new and changed documents, and remove documents that are gone.

    Return the number of new, changed, removed and unchanged documents. Documents that cannot be read are reported, and
    stay in the index as they were.

    Raises:
        UserError: too many documents are bad, an id is not unique, or a GPU has too little memory.
    """
    known = writer.known()
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    size = PASSES_PER_BATCH * options.batch_chunks
    batches = pipeline.read(source, known, cut, size, options.num_workers)
    pending = CommitBuffer(writer)
    problems = ProblemReport(settings.resolve(options.index), options.max_bad_share)
    with Progress(EmbedProgress(source.size)) as progress:
        try:
            for batch in pool.embed(batches):
                _record_ids(batch.seen, seen)
                problems.add(batch.problems, len(seen))
                pending.add(batch)
                new = len(set(batch.seen) - known.keys())
                counts.update(new=new, changed=len(batch.changed))
                progress.report(documents=len(batch.seen), chunks=len(batch.chunks), bytes_read=batch.size)
        except RayTaskError as error:
            raise explain(error, options) from None
        finally:
            pending.commit()
    problems.check(len(seen))
    problems.print()
    gone = known.keys() - seen
    gone -= problems.concern(gone)
    writer.remove(gone)
    counts.update(removed=len(gone), unchanged=len(seen) - counts["new"] - counts["changed"])
    return counts


def explain(error: RayTaskError, options: EmbedOptions) -> Exception:
    """Return a UserError if a document or a GPU's memory caused a task to fail, otherwise `error`."""
    if isinstance(error.cause, UserError):
        return UserError(str(error.cause).splitlines()[0])  # Ray adds its own advice on the following lines
    if isinstance(error.cause, torch.OutOfMemoryError):
        return UserError(
            f"a GPU has no room for {options.batch_chunks} chunks in one forward pass; pass a smaller --batch-chunks."
        )
    return error


class CommitBuffer:
    """Combines batches into fewer commits, because each commit is a new version of the index."""

    def __init__(self, writer: index.Writer) -> None:
        self._writer = writer
        self._batches: list[pipeline.EmbeddedBatch] = []
        self._last_commit_s = time.monotonic()

    def add(self, batch: pipeline.EmbeddedBatch) -> None:
        if len(batch.chunks):
            self._batches.append(batch)
        if time.monotonic() - self._last_commit_s > COMMIT_INTERVAL_S:
            self.commit()

    def commit(self) -> None:
        """Commit all collected batches."""
        if self._batches:
            chunks = pa.concat_tables(batch.chunks for batch in self._batches)
            self._writer.commit(chunks, [document for batch in self._batches for document in batch.changed])
        self._batches = []
        self._last_commit_s = time.monotonic()


class EmbedProgress:
    """Formats the progress line."""

    def __init__(self, input_bytes: int) -> None:
        self._input_bytes = input_bytes
        self._started_after_s = 0.0

    def __call__(self, totals: dict[str, int], seconds: float) -> str:
        if not totals:
            self._started_after_s = seconds
            return f"starting workers: {seconds:.0f} s"
        seconds -= self._started_after_s
        left = time_left(totals["bytes_read"], self._input_bytes, seconds)
        speed = totals["chunks"] / seconds
        return f"{totals['documents']:,} documents, {totals['chunks']:,} chunks, {speed:,.0f} chunks/s, {left}"


def _record_ids(ids: list[str], seen: set[str]) -> None:
    """Add ids to `seen`.

    Raises:
        UserError: two documents have the same id.
    """
    for document in ids:
        if document in seen:
            raise UserError(f"two documents have the id {document}: make the ids unique, or leave them out.")
        seen.add(document)
