"""DPO against TRL: trained tokens per second. Losses and gradients are compared in a test."""

import shutil
import statistics
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, trl
from benchmarks.harness import Row
from benchmarks.report import Result, at_least
from benchmarks.trl import FIRST, LLAMA
from raymill.data.tokenization import NOT_TRAINED
from raymill.data.tokenizer import load_tokenizer
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.trainer import train
from raymill.training.training_rows import PackedSource

ROUNDS, STEPS, LENGTH = 3, 24, 512
EQUAL_TOKENS = 60  # in each answer of equal length


def measure() -> Result:
    """Compare both in one process with the same number of threads."""
    with harness.scratch() as folder:
        harness.write_model(folder / "model", 8192, **LLAMA)
        rounds, padding = _speeds(folder, list(_pairs(450)), "mixed lengths")
        equal, _ = _speeds(folder, list(_equal_pairs(folder, 450)), "equal lengths")
    ratios = [harness.median_ratio(made, "this project", "TRL") for made in (rounds, equal)]
    return {
        "bars": [
            at_least(1.3, f"trained tokens/s to TRL's, whose batches have {padding:.0%} padding", ratios[0]),
            at_least(0, "the same for answers of equal length, without a bar", ratios[1]),
        ],
        "rounds": [{"round": number, **made} for number, made in enumerate(rounds, 1)],
    }


# ------------------------------------------------------------------------------------------ rows


def _pairs(count: int) -> Iterator[Row]:
    """Yield questions with two docstrings each, of 250 to 700 characters, so that TRL pads 30 to 50 %."""
    facts = [fact for fact in harness.docstrings() if 250 <= len(fact.answer) < 700]
    for number in range(count):
        fact, other = facts[number % len(facts)], facts[(7 * number + 13) % len(facts)]
        if fact.answer != other.answer:
            prompt = f"({number}) {fact.question}\n"
            yield {"prompt": prompt, "chosen": fact.answer, "rejected": other.answer}


def _equal_pairs(folder: Path, count: int) -> Iterator[Row]:
    """Yield pairs of answers with EQUAL_TOKENS tokens each, which begin where a token begins."""
    tokenizer = load_tokenizer(str(folder / "model"))
    for row in _pairs(20 * count):
        prompt, cut = row["prompt"], {}
        before = tokenizer(prompt)["input_ids"]
        whole = len(before) + EQUAL_TOKENS - 1  # an EOS token follows
        for name in ("chosen", "rejected"):
            encoded = tokenizer(prompt + row[name], return_offsets_mapping=True)
            if len(encoded["input_ids"]) > whole:
                cut[name] = (prompt + row[name])[len(prompt) : encoded["offset_mapping"][whole - 1][1]].rstrip()
        again = [tokenizer(prompt + answer)["input_ids"] for answer in cut.values()]
        are_equal = [len(ids) for ids in again] == [whole, whole]
        if are_equal and again[0] != again[1] and all(ids[: len(before)] == before for ids in again):
            count -= 1
            yield {"prompt": prompt} | cut
        if not count:
            return


def _pack(folder: Path, rows: Iterable[Row]) -> None:
    shutil.rmtree(folder / "packed", ignore_errors=True)
    harness.write_rows(folder / "rows.jsonl", rows)
    more = ("--task", "preference", "--eval-share", "0.001")
    harness.preprocess(folder / "rows.jsonl", folder / "packed", folder / "model", LENGTH, *more)


def _options(folder: Path, **more: Any) -> DDPOptions:
    given = {
        "global_batch_rows": 4,
        "micro_batch_rows": 2,
        "learning_rate": 1e-4,
        "warmup_steps": 0,
        "schedule": "constant",
        "objective": "dpo",
        "steps": STEPS,
        "eval_every": STEPS,
        "checkpoint_every": STEPS,
        "log_every": FIRST,
    }
    return harness.one_process(folder, **given | more)


def _steps_of_pairs(options: DDPOptions, rows: list[Row]) -> list[list[Row]]:
    """Return the pairs of each of our steps."""
    tokenizer = load_tokenizer(options.model)
    by_text = {row["prompt"] + row["chosen"]: row for row in rows}
    source = PackedSource(options, SingleProcess(Path(options.output), torch.device("cpu"), 1))
    steps = []
    for step in range(1, options.steps + 1):
        batch, found = source.rows(step), []
        for ids, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
            starts = [place for place, position in enumerate(positions) if position == 0] + [len(ids)]
            texts = [tokenizer.decode(ids[a:b], skip_special_tokens=True) for a, b in pairwise(starts)]
            found += [by_text[text] for text in texts[0 : len(texts) // 2 * 2 : 2]]
        steps.append(found)
    return steps


def _trained_tokens(options: DDPOptions) -> list[int]:
    """Return the trained tokens of each of our steps."""
    source = PackedSource(options, SingleProcess(Path(options.output), torch.device("cpu"), 1))
    return [int((source.rows(step)["labels"] != NOT_TRAINED).sum()) for step in range(1, options.steps + 1)]


# ------------------------------------------------------------------------------------------ both trainers


def _train(options: DDPOptions) -> list[dict[str, float]]:
    folder = Path(options.output, options.name)
    train(options, SingleProcess(folder, torch.device("cpu"), options.keep_checkpoints), DDP)
    metrics = harness.metrics(folder)
    shutil.rmtree(folder)
    return metrics


def _train_with_trl(folder: Path, options: DDPOptions, rows: list[Row], batch: int, passes: int) -> dict[str, Any]:
    """Train with TRL on rows in this order, in batches of so many pairs and so many passes a step."""
    given = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": passes,
        "lr_scheduler_type": "constant",
        "lr_scheduler_kwargs": None,
        "max_length": LENGTH,
        "beta": options.beta,
        "precompute_ref_log_probs": True,
    }
    asked = {
        "model": options.model,
        "rows": str(harness.write_rows(folder / "trl.jsonl", rows)),
        "config": trl.config_of(folder, options) | given,
        "threads": options.cpus_per_worker,
    }
    return harness.ask_peer("with_trl_pairs.py", asked)


def _speeds(folder: Path, rows: list[Row], title: str) -> tuple[list[harness.Round], float]:
    """Return the trained tokens/s of both, and the share of padding in TRL's batches. Reference passes do not count."""
    _pack(folder, rows)
    options = _options(folder)
    steps, tokens = _steps_of_pairs(options, rows), _trained_tokens(options)
    _train(options.model_copy(update={"steps": 1}))  # computes the reference
    pairs = statistics.mean(len(step) for step in steps)
    passes = options.global_batch_rows // options.micro_batch_rows
    batch = round(pairs / passes)
    ordered = [row for step in steps for row in step]
    used = [*ordered, *rows][: batch * passes * STEPS]
    paddings: list[float] = []

    def ours() -> float:
        seconds = sum(options.global_batch_rows * LENGTH / step["tokens_per_s"] for step in _train(options)[FIRST:])
        return sum(tokens[FIRST:]) / seconds

    def theirs() -> float:
        found = _train_with_trl(folder, options, used, batch, passes)
        paddings.append(found["padding"])
        first, last = found["steps"][FIRST - 1], found["steps"][-1]
        each = sum(tokens) / sum(len(step) for step in steps)  # trained tokens of a pair
        return each * batch * passes * (len(found["steps"]) - FIRST) / (last["seconds"] - first["seconds"])

    print(f"{title}: {pairs:.1f} pairs a step here, {batch * passes} with TRL", flush=True)
    rounds = harness.alternate({"this project": ours, "TRL": theirs}, ROUNDS, "trained tokens/s")
    return rounds, statistics.mean(paddings)


if __name__ == "__main__":
    harness.main(measure)
