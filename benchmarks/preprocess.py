"""Measures the rows/s of `preprocess` with Qwen's vocabulary, and its memory for ten times as many rows."""

import functools
import json
import os
import random
import shutil
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.report import Result, at_least, at_most
from jobs import preprocess
from jobs.preprocess import PreprocessOptions
from raymill import settings
from raymill.data.examples import Completion, to_json
from raymill.data.filters import contamination, near_duplicates, word_runs
from raymill.data.filters.contamination import Questions
from raymill.data.filters.gate import Gate
from raymill.data.filters.options import FilterOptions
from raymill.errors import UserError

ROWS, ROUNDS = 300_000, 9
FEW = 100  # rows of the runs that measure the start-up: processing them takes almost no time
MEMORY_ROWS = 30_000
MEMORY_SHARD_MIB = 8  # small, so that even MEMORY_ROWS rows keep all cores busy
LENGTH = 1024
EVAL_SHARE = 0.02
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}


KINDS = {"short": 1, "six turns": 3, "long": 20, "own system prompts": 1}
"""Number of questions in each kind of row. A row of the comparison has one to three."""
KIND_ROWS = 30_000
FILTER_ROWS, FILTER_ROUNDS = 300_000, 3
FILTERED = 8000
WORDS = [f"{first}{second}" for first in string.ascii_lowercase for second in string.ascii_lowercase]
ALONE: dict[str, Any] = {
    "languages": ["en"],
    "min_words": 5,
    "rules gopher": ["gopher"],
    "rules gopher_repetition": ["gopher_repetition"],
    "rules fineweb": ["fineweb"],
    "pii": "replace",
}
"""Filters and their settings."""


class Work(NamedTuple):
    """The duration of one run, and its token counts, which must be the same for all implementations."""

    seconds: float
    tokens: int
    trained_tokens: int


def measure() -> Result:
    """Compare `preprocess`, `datasets.map` and a bare loop. The bare loop only renders, tokenizes and masks.

    The other two also shuffle, hold out evaluation rows, pack, and write parquet. `datasets.map` uses Hugging Face's
    tokenizer, as its users do, and the other two use fastokens.
    """
    with harness.scratch() as folder:
        harness.write_model_with_qwens_vocabulary(folder / "model", **TINY)
        few = harness.write_rows(folder / "few.jsonl", harness.conversations(FEW))
        all_rows = harness.write_rows(folder / "rows.jsonl", harness.conversations(ROWS))
        with harness.one_ray(os.cpu_count()):
            ways = {"preprocess": _ours, "datasets.map": _datasets, "bare loop": _fastokens}
            _refuse_different_work([way(few, folder) for way in ways.values()])
            start_up = {name: min(way(few, folder).seconds for _ in range(3)) for name, way in ways.items()}
            timed = {
                name: functools.partial(_rows_per_s, way, all_rows, folder, start_up[name])
                for name, way in ways.items()
            }
            rounds = harness.alternate(timed, ROUNDS, "rows/s")
            kinds = [_kind(name, folder, start_up["preprocess"]) for name in KINDS]
            filtered = _filtered_share(folder)
        memory = [_peak_mib(rows, folder) for rows in (MEMORY_ROWS, 10 * MEMORY_ROWS)]
    by_datasets, by_bare = (harness.median_ratio(rounds, "preprocess", name) for name in list(ways)[1:])
    return {
        "bars": [
            at_least(2.5, "median ratio of rows/s to datasets.map", by_datasets),
            at_least(0.4, "median ratio of rows/s to the bare loop", by_bare),
            at_most(1.4, "ratio of time with near_duplicates and decontaminate", filtered),
            at_most(1.2, f"ratio of memory, {10 * MEMORY_ROWS:,} to {MEMORY_ROWS:,} rows", memory[1] / memory[0]),
        ],
        "rounds": [{"round": number, **made} for number, made in enumerate(rounds, 1)]
        + [{"round": "start-up (s)", **start_up}],
        "kinds": kinds,
        "filters": _filter_speeds(),
        "memory_mib": memory,
    }


def _filtered_share(folder: Path) -> float:
    """Return how much longer the job takes with both filters that compare rows. One row in twenty is a near-duplicate.

    Both times include the start-up.
    """
    draw = random.Random(0)
    found = []
    for number in range(FILTER_ROWS):
        near = number and number % 20 == 0
        answer = [*found[-1][:-1], "other"] if near else draw.choices(WORDS, k=80)
        found.append(answer)
    made = (
        {"messages": [_message("user", f"What is {one[0]}?"), _message("assistant", " ".join(one))]} for one in found
    )
    rows = harness.write_rows(folder / "filtered.jsonl", made)
    questions = [{"question": " ".join(draw.choices(WORDS, k=30))} for _ in range(1000)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    filters = FilterOptions(near_duplicates=0.8, decontaminate=(str(folder / "questions.jsonl"),))
    ways = {
        "filtered": lambda: FILTER_ROWS / _ours(rows, folder, filters=filters).seconds,
        "unfiltered": lambda: FILTER_ROWS / _ours(rows, folder).seconds,
    }
    return 1 / harness.median_ratio(harness.alternate(ways, FILTER_ROUNDS, "rows/s"), *ways)


def _filter_speeds() -> dict[str, float]:
    """Return how many rows/s each filter alone takes on one core. A row has 80 words."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=80)) for _ in range(FILTERED)]
    rows = [{"row": to_json(Completion("", text)), "problem": None} for text in texts]
    asked = Questions.of(contamination.rare([contamination.of_parts([text], 13) for text in texts[:1000]]))
    ways: dict[str, Callable[[], Any]] = {
        "near_duplicates": lambda: near_duplicates.signatures(word_runs.words(texts), 5),
        "decontaminate": lambda: contamination.contains(asked, *word_runs.words_of([[text] for text in texts]), 13),
    }
    for name, value in ALONE.items():
        gate = Gate.of(FilterOptions.model_validate({name.partition(" ")[0]: value}), (), 0)
        assert gate
        ways[name] = functools.partial(gate.filter_rows, rows, 0)
    found = {}
    for name, way in ways.items():
        way()
        started = time.perf_counter()
        way()
        found[name] = FILTERED / (time.perf_counter() - started)
    return found


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _rows_per_s(way: Callable[[Path, Path], Work], rows: Path, folder: Path, start_up_s: float) -> float:
    """Return the rows/s without the start-up, which takes a few seconds for any number of rows."""
    return (ROWS - FEW) / (way(rows, folder).seconds - start_up_s)


def _ours(rows: Path, folder: Path, **changed: Any) -> Work:
    """Run the job on the running Ray instance.

    Every run makes the same number of shards, because each shard is a task, and starting a task takes time.
    """
    shutil.rmtree(folder / "packed", ignore_errors=True)
    options = settings.load(PreprocessOptions, "preprocess", profile="local")
    share = rows.stat().st_size / (folder / "rows.jsonl").stat().st_size
    changes = {
        "input": str(rows),
        "output": str(folder / "packed"),
        "model": str(folder / "model"),
        "sequence_length": LENGTH,
        "shard_mib": options.shard_mib * share,
        "eval_share": EVAL_SHARE,
    }
    options = options.model_copy(update=changes | changed)
    started = time.perf_counter()
    preprocess.main(options)
    seconds = time.perf_counter() - started
    manifest = json.loads((folder / "packed" / "manifest.json").read_text(encoding="utf-8"))
    return Work(seconds, *(manifest["train"][count] + manifest["eval"][count] for count in Work._fields[1:]))


def _datasets(rows: Path, folder: Path) -> Work:
    return _peer("with_datasets.py", rows, folder)


def _fastokens(rows: Path, folder: Path) -> Work:
    return _peer("with_fastokens.py", rows, folder)


def _kind(name: str, folder: Path, start_up_s: float) -> dict[str, Any]:
    """Return the speed of our job with rows of one kind, per second and core."""
    count = KIND_ROWS // KINDS[name]
    rows = harness.write_rows(folder / "kind.jsonl", _rows(name, count))
    work = _ours(rows, folder)
    seconds = (work.seconds - start_up_s) * (os.cpu_count() or 1)
    made = {"rows": name, "tokens a row": work.tokens / count, "rows/s": count / seconds}
    return made | {"tokens/s": work.tokens / seconds}


def _rows(kind: str, count: int) -> Iterator[harness.Row]:
    draw = random.Random(0)
    for number in range(count):
        messages = []
        for fact in draw.choices(harness.docstrings(), k=KINDS[kind]):
            messages.append({"role": "user", "content": f"({number}) {fact.question}"})
            messages.append({"role": "assistant", "content": fact.answer})
        if kind == "long":  # one answer
            messages = [messages[0], {"role": "assistant", "content": "\n\n".join(m["content"] for m in messages[1:])}]
        if kind == "own system prompts":
            messages.insert(
                0, {"role": "system", "content": f"You are assistant {number}. {messages[1]['content'][:99]}"}
            )
        yield {"messages": messages}


def _peer(script: str, rows: Path, folder: Path) -> Work:
    asked = {"model": str(folder / "model"), "rows": str(rows), "sequence_length": LENGTH, "eval_share": EVAL_SHARE}
    return Work(**harness.ask_peer(script, asked))


def _refuse_different_work(made: list[Work]) -> None:
    if len({work[1:] for work in made}) > 1:
        raise UserError(f"the implementations made different tokens, so their times cannot be compared: {made}")


def _peak_mib(count: int, folder: Path) -> float:
    """Return the peak memory of the job, its own Ray instance and all workers."""
    rows = harness.write_rows(folder / "memory.jsonl", harness.conversations(count))
    shutil.rmtree(folder / "packed", ignore_errors=True)
    with harness.peak_memory() as peak:
        harness.preprocess(rows, folder / "packed", folder / "model", LENGTH, "--shard-mib", str(MEMORY_SHARD_MIB))
    print(f"{count:,} rows: {peak['mib']:,.0f} MiB", flush=True)
    return peak["mib"]


if __name__ == "__main__":
    harness.main(measure)
