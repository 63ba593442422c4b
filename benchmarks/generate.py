"""Compares the speed of `generate` to that of vLLM's offline `LLM.generate`, with the same rows and engine settings."""

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from benchmarks import harness
from benchmarks.report import Result, at_least
from benchmarks.serving import LARGE, SHAPES, THREADS, VOCABULARY
from jobs import generate
from jobs.generate import GenerateOptions
from raymill import settings
from raymill.serving import app
from raymill.serving.options import ServeOptions

ROWS, ROUNDS, TOKENS = 1500, 5, 32


class Work(NamedTuple):
    """The duration and the speed of one run, and its answers."""

    seconds: float
    """Duration of the whole run, including the start of the engine."""
    tokens_per_s: float
    """Speed without the start of the engine. Every answer has TOKENS tokens: untrained models do not stop early."""
    answers: dict[str, str]
    """Each answer, by the id of its row."""


def measure() -> Result:
    """Compare the job with LLM.generate. Each run starts an engine, answers the rows, and writes parquet."""
    os.environ["OMP_NUM_THREADS"] = THREADS  # one thread per engine leaves a core for everything else
    with harness.scratch() as folder:
        size = harness.write_model(folder / "model", VOCABULARY[LARGE], **SHAPES[LARGE])
        print(f"a model of {size / 1e6:.1f} million parameters", flush=True)
        rows = _write_rows(folder / "rows.jsonl", ROWS)
        done: dict[str, list[Work]] = {"generate": [], "LLM.generate": []}
        with harness.one_ray():
            ways = {"generate": _ours, "LLM.generate": _vllm}
            timed = {
                name: functools.partial(_tokens_per_s, way, rows, folder, done[name]) for name, way in ways.items()
            }
            rounds = harness.alternate(timed, ROUNDS, "tokens/s")
    ours, theirs = (works[-1].answers for works in done.values())
    same = sum(answer == theirs[name] for name, answer in ours.items()) / len(theirs)
    return {
        "bars": [
            at_least(0.95, "median ratio of tokens/s to LLM.generate", harness.median_ratio(rounds, *ways)),
            at_least(0.99, "share of the answers that are the same", same),
        ],
        "rounds": [
            {"round": at + 1, **made} | {f"{name}, whole run (s)": works[at].seconds for name, works in done.items()}
            for at, made in enumerate(rounds)
        ],
    }


def _write_rows(file: Path, count: int) -> Path:
    """Write `count` different questions as rows."""
    facts = harness.docstrings()
    asked = [f"({number}) {facts[number % len(facts)].question}" for number in range(count)]
    return harness.write_rows(
        file, ({"id": str(at), "messages": [{"role": "user", "content": text}]} for at, text in enumerate(asked))
    )


def _tokens_per_s(way: Callable[[Path, Path], Work], rows: Path, folder: Path, done: list[Work]) -> float:
    done.append(way(rows, folder))
    return done[-1].tokens_per_s


def _serving(folder: Path) -> ServeOptions:
    return settings.load(ServeOptions, "serve", profile="local").model_copy(update={"model": str(folder / "model")})


def _ours(rows: Path, folder: Path) -> Work:
    """Run the job on the running Ray instance."""
    output = folder / "generated"
    shutil.rmtree(output, ignore_errors=True)
    changes = {"input": str(rows), "output": str(output), "model": str(folder / "model"), "max_tokens": TOKENS}
    options = settings.load(GenerateOptions, "generate", profile="local").model_copy(update=changes)
    started = time.perf_counter()
    generate.main(options)
    return Work(time.perf_counter() - started, _speed(output / "answers"), _answers(output / "answers"))


def _speed(folder: Path) -> float:
    """Return the tokens/s between the first and the last file of answers, without the start of the engine."""
    written = sorted((file.stat().st_mtime, pq.read_metadata(file).num_rows) for file in folder.glob("*.parquet"))
    (first, before), (last, _) = written[0], written[-1]
    return (ROWS - before) * TOKENS / (last - first)


def _vllm(rows: Path, folder: Path) -> Work:
    output = folder / "by-vllm"
    output.mkdir(exist_ok=True)
    serving = _serving(folder)
    asked = {
        "rows": str(rows),
        "output": str(output / "answers.parquet"),
        "engine": {"model": serving.source} | app.engine_args(serving),
        "max_tokens": TOKENS,
    }
    started = time.perf_counter()
    answered_s = harness.ask_peer("with_vllm.py", asked, Path(sys.executable))["answered_s"]
    return Work(time.perf_counter() - started, ROWS * TOKENS / answered_s, _answers(output))


def _answers(folder: Path) -> dict[str, str]:
    tables = [pq.read_table(file, columns=["id", "answer"]).to_pylist() for file in folder.glob("*.parquet")]
    return {row["id"]: row["answer"] for table in tables for row in table}


if __name__ == "__main__":
    harness.main(measure)
