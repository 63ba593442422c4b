"""Compares the speed of `embed` with two workers to that of two plain processes that call the same functions."""

import functools
import multiprocessing
import shutil
import time
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.report import Result, at_least
from jobs import embed
from jobs.embed import EmbedOptions
from raymill import settings
from raymill.demo import assets
from raymill.rag import documents, embedding, index
from raymill.rag.chunking import Chunker
from raymill.rag.embedder import EmbeddingModelInfo
from raymill.rag.pipeline import EmbeddingWorker

DOCUMENTS, ROUNDS = 1200, 5
PROCESSES = 2


def measure() -> Result:
    """Time the whole job, and the two plain processes from start to exit.

    Both times include loading the model in each worker or process. Ray is already running.
    """
    with harness.scratch() as folder:
        assets.write_embedder(folder / "model")
        texts = [fact.answer for fact in harness.docstrings()[:DOCUMENTS]]
        rows = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
        harness.write_rows(folder / "all.jsonl", rows)
        for part in range(PROCESSES):
            harness.write_rows(folder / f"part-{part}.jsonl", rows[part::PROCESSES])
        with harness.one_ray():
            ways = {"embed": functools.partial(_ours, folder), "two processes": functools.partial(_plain, folder)}
            rounds = harness.alternate(ways, ROUNDS, "chunks/s")
    ratio = harness.median_ratio(rounds, "embed", "two processes")
    return {
        "bars": [at_least(0.9, "median ratio of chunks/s to two plain processes", ratio)],
        "rounds": [{"round": number, **made} for number, made in enumerate(rounds, 1)],
    }


def _options(folder: Path, name: str) -> EmbedOptions:
    own = {
        "input": str(folder / f"{name}.jsonl"),
        "index": str(folder / f"{name}-index"),
        "model": str(folder / "model"),
        "questions": "",
        "num_workers": PROCESSES,
    }
    return settings.load(EmbedOptions, "embed", profile="local").model_copy(update=own)


def _ours(folder: Path) -> float:
    shutil.rmtree(folder / "all-index", ignore_errors=True)
    started = time.perf_counter()
    embed.main(_options(folder, "all"))
    seconds = time.perf_counter() - started
    return _chunks(folder, "all") / seconds


def _plain(folder: Path) -> float:
    names = [f"part-{part}" for part in range(PROCESSES)]
    for name in names:
        shutil.rmtree(folder / f"{name}-index", ignore_errors=True)
    spawn = multiprocessing.get_context("spawn")
    started = time.perf_counter()
    processes = [spawn.Process(target=_one_process, args=(_options(folder, name),)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - started
    return sum(_chunks(folder, name) for name in names) / seconds


def _one_process(options: EmbedOptions) -> None:
    """Read, split, embed and commit the documents in one process."""
    torch.set_num_threads(1)  # as in each of Ray's workers
    described = EmbeddingModelInfo(options.model)
    recipe = index.IndexConfig(options.model, options.chunk_tokens, options.chunk_overlap)
    writer = index.Writer(options.index, options.input, recipe, described.dimension, fresh=False, confirm=lambda: None)
    cut = Chunker(described.tokenizer, options.chunk_tokens, options.chunk_overlap)
    worker = EmbeddingWorker(options.model, options.device, options.precision, options.batch_chunks)
    source = documents.find(options.input)
    waiting = embedding.CommitBuffer(writer)
    for piece in documents.pieces(source):
        for batch in documents.batches(source, piece, {}, cut, embedding.PASSES_PER_BATCH * options.batch_chunks):
            waiting.add(worker.embed_batch(batch))
    waiting.commit()
    writer.finish()


def _chunks(folder: Path, name: str) -> int:
    return index.lancedb.connect(folder / f"{name}-index").open_table(index.TABLE).count_rows()


if __name__ == "__main__":
    harness.main(measure)
