"""Compares our masks, losses and speed with those of TRL's SFTTrainer for the same model, rows and options."""

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.report import Result, at_least, at_most
from raymill.data.tokenization import DocumentTokenizer
from raymill.data.tokenizer import load_tokenizer, padding_id
from raymill.training.dataset import COLUMNS
from raymill.training.ddp import DDP
from raymill.training.optimizers import BETAS
from raymill.training.options import DDPOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.trainer import train
from raymill.training.training_rows import PackedSource

ROUNDS = 3
STEPS, FIRST = 32, 4  # the first FIRST steps allocate memory and do not count
LENGTH = 512
MASKS = 1000  # conversations whose masks are compared
LLAMA = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4}


def measure() -> Result:
    """Compare both trainers, each in one process with the same number of threads."""
    with harness.scratch() as folder:
        harness.write_model(folder / "model", 8192, **LLAMA)
        rows = list(harness.conversations(6000, turns=2))
        harness.write_rows(folder / "rows.jsonl", rows)
        harness.preprocess(folder / "rows.jsonl", folder / "packed", folder / "model", LENGTH)
        options = _options(folder)
        different = _different_masks(folder, options, rows[:MASKS])
        packed = list(_packed_rows(options))
        ours, theirs = _train(options), _train_packed(folder, options, packed)
        losses = {"this project": [step["loss"] for step in ours], "TRL": [step["loss"] for step in theirs]}
        apart = max(abs(one - other) for one, other in zip(*losses.values(), strict=True))
        ways = {
            "this project": lambda: _our_speed(_train(options), packed, options.global_batch_rows),
            "TRL, packed": lambda: _speed(_train_packed(folder, options, packed)),
            "TRL, its default": lambda: _speed(_train_padded(folder, options, packed, rows)),
        }
        rounds = harness.alternate(ways, ROUNDS, "real tokens/s")
    by_packed, by_default = (harness.median_ratio(rounds, "this project", name) for name in list(ways)[1:])
    return {
        "bars": [
            at_most(0, f"rows of {MASKS} whose masks differ", different),
            at_most(1e-3, f"largest difference between the losses in {STEPS} steps", apart),
            at_least(1, "median ratio of real tokens/s to TRL, both packed", by_packed),
            at_least(1.5, "median ratio of real tokens/s to TRL's default, without packing", by_default),
        ],
        "rounds": [{"round": number, **made} for number, made in enumerate(rounds, 1)],
        "losses": losses,
    }


def _options(folder: Path) -> DDPOptions:
    return harness.one_process(
        folder,
        global_batch_rows=4,
        micro_batch_rows=2,
        learning_rate=1e-3,
        warmup_steps=10,
        steps=STEPS,
        eval_every=STEPS,
        checkpoint_every=STEPS,
        log_every=FIRST,
    )


def config_of(folder: Path, options: DDPOptions) -> dict[str, Any]:
    """Return the options under TRL's names, with a scheduler whose warm-up counts steps from 1, like ours."""
    return {
        "output_dir": str(folder / "trl"),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.micro_batch_rows,
        "gradient_accumulation_steps": options.global_batch_rows // options.micro_batch_rows,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": options.min_lr_ratio},
        "warmup_steps": options.warmup_steps,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


# ------------------------------------------------------------------------------------------ this project


def _train(options: DDPOptions) -> list[dict[str, float]]:
    """Train, and return the metrics of each step. Delete the run, so that the next run starts from scratch."""
    folder = Path(options.output, options.name)
    train(options, SingleProcess(folder, torch.device("cpu"), options.keep_checkpoints), DDP)
    metrics = harness.metrics(folder)
    shutil.rmtree(folder)
    return metrics


def _our_speed(metrics: list[dict[str, float]], packed: list[Row], rows_a_step: int) -> float:
    """Return the tokens/s after the first steps, not counting padding. The run's own metric counts it."""
    real = sum(len(row["input_ids"]) for row in packed[FIRST * rows_a_step :])
    return real / sum(rows_a_step * LENGTH / step["tokens_per_s"] for step in metrics[FIRST:])


# ------------------------------------------------------------------------------------------ TRL


def _different_masks(folder: Path, options: DDPOptions, rows: list[Row]) -> int:
    """Return the number of conversations for which the labels of TRL and `preprocess` differ."""
    documents = DocumentTokenizer(options.model, LENGTH)(pa.Table.from_pylist(rows))
    ours = [labels for labels in documents["labels"].to_pylist() if labels]
    config = {"assistant_only_loss": True, "max_length": LENGTH}
    theirs = _ask(folder, options, rows, config, trains=False)["labels"]
    return sum(mine != other for mine, other in zip(ours, theirs, strict=True))


def _packed_rows(options: DDPOptions) -> Iterator[Row]:
    """Yield the rows of our training steps in order, in TRL's format, which has document lengths instead of padding."""
    padding = padding_id(load_tokenizer(options.model))
    source = PackedSource(options, SingleProcess(Path(options.output), torch.device("cpu"), 1))
    for step in range(1, options.steps + 1):
        batch = source.rows(step)
        for tokens, labels, positions in zip(*(batch[name].tolist() for name in COLUMNS), strict=True):
            edges = [place for place, position in enumerate(positions) if position == 0] + [len(tokens)]
            if set(tokens[edges[-2] :]) == {padding}:
                edges.pop()
            lengths = [end - start for start, end in pairwise(edges)]
            yield {"input_ids": tokens[: edges[-1]], "labels": labels[: edges[-1]], "seq_lengths": lengths}


def _train_packed(folder: Path, options: DDPOptions, packed: list[Row]) -> list[dict[str, float]]:
    """Train on our packed rows with TRL's option padding_free, which joins the rows of a micro-batch into one row."""
    return _ask(folder, options, packed, {"padding_free": True, "max_length": None}, trains=True)["steps"]


def _train_padded(folder: Path, options: DDPOptions, packed: list[Row], rows: list[Row]) -> list[dict[str, float]]:
    """Train on padded conversations. A micro-batch has as many as our packed micro-batches have on average."""
    documents = round(options.micro_batch_rows * sum(len(row["seq_lengths"]) for row in packed) / len(packed))
    config = {"assistant_only_loss": True, "max_length": LENGTH, "per_device_train_batch_size": documents}
    return _ask(folder, options, rows, config, trains=True)["steps"]


def _speed(steps: list[dict[str, float]]) -> float:
    """Return the tokens/s after the first steps."""
    first, last = steps[FIRST - 1], steps[-1]
    return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])


def _ask(folder: Path, options: DDPOptions, rows: list[Row], config: dict[str, Any], *, trains: bool) -> dict[str, Any]:
    return harness.ask_peer(
        "with_trl.py",
        {
            "model": options.model,
            "rows": str(harness.write_rows(folder / "trl.jsonl", rows)),
            "config": config_of(folder, options) | config,
            "threads": options.cpus_per_worker,
            "trains": trains,
        },
    )


if __name__ == "__main__":
    harness.main(measure)
