"""Preference optimization against TRL: losses and gradients with the same pairs, and trained tokens per second."""

import shutil
import statistics
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.report import Result, at_least, at_most
from benchmarks.trl import FIRST, LLAMA
from raymill.data.tokenization import NOT_TRAINED
from raymill.data.tokenizer import load_tokenizer
from raymill.training.ddp import DDP
from raymill.training.optimizers import BETAS
from raymill.training.options import DDPOptions, TrainOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.trainer import PackedSource, train

ROUNDS, STEPS, LENGTH = 3, 24, 512
EQUAL_STEPS, EQUAL_TOKENS = 6, 60  # in the comparison of losses, each answer has as many tokens
OBJECTIVES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "dpo": ({"beta": 0.1}, "dpo", {"loss_type": ["sigmoid"]}),
    "ipo": ({"beta": 0.1}, "dpo", {"loss_type": ["ipo"]}),
    "robust": ({"beta": 0.1, "label_smoothing": 0.1}, "dpo", {"loss_type": ["robust"], "label_smoothing": 0.1}),
    "simpo": ({"beta": 2.0, "simpo_gamma": 1.0}, "cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0}),
    "orpo": ({"beta": 0.1}, "orpo", {}),
}
"""Our settings, and the kind and the settings of TRL's trainer."""


def measure() -> Result:
    """Compare both in one process with the same number of threads."""
    with harness.scratch() as folder:
        harness.write_model(folder / "model", 8192, **LLAMA)
        apart = _compare(folder)
        rounds, padding = _speeds(folder, list(_pairs(2600)), "mixed lengths")
        equal, _ = _speeds(folder, list(_equal_pairs(folder, 1600)), "equal lengths")
    ratios = [harness.median_ratio(made, "this project", "TRL") for made in (rounds, equal)]
    bars = [
        at_most(1e-5, f"{name}: largest relative difference of the {kind}", value)
        for name, found in apart.items()
        for kind, value in found.items()
    ]
    return {
        "bars": [
            *bars,
            at_least(1.3, f"trained tokens/s to TRL's, whose batches have {padding:.0%} padding", ratios[0]),
            at_least(0, "the same for answers of equal length, without a bar", ratios[1]),
        ],
        "rounds": [{"round": number, **made} for number, made in enumerate(rounds, 1)],
    }


# ------------------------------------------------------------------------------------------ rows


def _pairs(count: int) -> Iterator[Row]:
    """Yield questions with two docstrings each, of the lengths that docstrings have, up to 700 characters."""
    facts = [fact for fact in harness.docstrings() if len(fact.answer) < 700]
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


class PlainSGD(DDP):
    """Without AdamW, whose first steps turn rounding errors of gradients near 0 into steps of full size."""

    def make_optimizer(self, model: PreTrainedModel, options: TrainOptions) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters())


def _train(options: DDPOptions, strategy: type[DDP] = DDP) -> list[dict[str, float]]:
    folder = Path(options.output, options.name)
    train(options, SingleProcess(folder, torch.device("cpu"), options.keep_checkpoints), strategy)
    metrics = harness.metrics(folder)
    shutil.rmtree(folder)
    return metrics


def _train_with_trl(
    folder: Path, options: DDPOptions, rows: list[Row], kind: str, config: dict[str, Any], batch: int, passes: int
) -> dict[str, Any]:
    """Train with TRL on rows in this order, in batches of so many pairs and so many passes a step."""
    given = {
        "output_dir": str(folder / "trl"),
        "max_steps": options.steps,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": passes,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm,
        "train_sampling_strategy": "sequential",
        "max_length": LENGTH,
        "beta": options.beta,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **({"precompute_ref_log_probs": True} if kind == "dpo" else {}),
    }
    asked = {
        "model": options.model,
        "rows": str(harness.write_rows(folder / "trl.jsonl", rows)),
        "kind": kind,
        "config": given | config,
        "threads": options.cpus_per_worker,
    }
    return harness.ask_peer("with_trl_pairs.py", asked)


def _compare(folder: Path) -> dict[str, dict[str, float]]:
    """Return how far both are apart in EQUAL_STEPS steps, by objective. TRL has one micro-batch a step.

    TRL's cross-entropy in ORPO counts the tokens of prompts, so there the odds ratios of the first step are compared.
    """
    rows = list(_equal_pairs(folder, 400))
    _pack(folder, rows)
    apart = {}
    for name, (own, kind, config) in OBJECTIVES.items():
        given = {"learning_rate": 1e-2, "weight_decay": 0.0, "steps": EQUAL_STEPS}
        given |= {"eval_every": 100, "checkpoint_every": 100}
        options = _options(folder, objective=name, **given, **own)
        steps = _steps_of_pairs(options, rows)
        [pairs] = {len(step) for step in steps}
        ordered = [row for step in steps for row in step]
        ours = _train(options, PlainSGD)
        config = config | {"optim": "sgd"}
        theirs = _train_with_trl(folder, options, ordered, kind, config, pairs, 1)["steps"]
        if name == "orpo":
            odds = -options.beta * theirs[0]["log_odds_ratio"]
            apart[name] = {"odds ratios": abs(ours[0]["odds_ratio_loss"] / odds - 1)}
        else:
            apart[name] = {
                title: max(abs(a[key] / b[key] - 1) for a, b in zip(ours, theirs, strict=True))
                for title, key in (("losses", "loss"), ("gradient norms", "grad_norm"))
            }
        print(f"{name}: {apart[name]}", flush=True)
    return apart


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
        found = _train_with_trl(folder, options, used, "dpo", OBJECTIVES["dpo"][2], batch, passes)
        paddings.append(found["padding"])
        first, last = found["steps"][FIRST - 1], found["steps"][-1]
        each = sum(tokens) / sum(len(step) for step in steps)  # trained tokens of a pair
        return each * batch * passes * (len(found["steps"]) - FIRST) / (last["seconds"] - first["seconds"])

    print(f"{title}: {pairs:.1f} pairs a step here, {batch * passes} with TRL", flush=True)
    rounds = harness.alternate({"this project": ours, "TRL": theirs}, ROUNDS, "trained tokens/s")
    return rounds, statistics.mean(paddings)


if __name__ == "__main__":
    harness.main(measure)
