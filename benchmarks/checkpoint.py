"""Measures how long a checkpoint blocks training on slow storage."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.report import Result, at_most
from raymill.demo import assets
from raymill.training import checkpoints
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions
from raymill.training.runtimes.runtime import Metrics, SingleProcess, WriteCheckpoint
from raymill.training.trainer import train

STEPS, EVERY = 30, 10
STORAGE_S = 8  # added to the time that the disk takes
LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}


class SlowStorage(SingleProcess):
    """A runtime with slow storage."""

    def _keep(self, metrics: Metrics, write: WriteCheckpoint) -> None:
        super()._keep(metrics, write)
        time.sleep(STORAGE_S)


def measure() -> Result:
    """Time each step and each checkpoint. The steps after a checkpoint run while it is being written."""
    with harness.scratch() as folder:
        parameters = harness.write_model(folder / "model", 4096, **LLAMA)
        assets.write_data(folder / "data")
        harness.preprocess(folder / "data/*.jsonl", folder / "packed", folder / "model", 128)
        options = _options(folder)
        blocked: list[float] = []
        checkpoints.save = _clocked(checkpoints.save, blocked)
        runtime = SlowStorage(folder / "runs" / options.name, torch.device("cpu"), options.keep_checkpoints)
        train(options, runtime, DDP)
        seconds = [
            options.global_batch_rows * 128 / row["tokens_per_s"]
            for row in harness.metrics(folder / "runs" / options.name)
        ]
    step = statistics.median(seconds[:EVERY])
    rounds = [
        {
            "checkpoint after step": number * EVERY,
            "training blocked (s)": seconds_blocked,
            "in steps": seconds_blocked / step,
            "step before (s)": step,
            "step meanwhile (s)": statistics.median(meanwhile) if meanwhile else "",
        }
        for number, seconds_blocked in enumerate(blocked, 1)
        for meanwhile in [seconds[number * EVERY : number * EVERY + 4]]
    ]
    longest = max(made["in steps"] for made in rounds)
    return {
        "bars": [at_most(2, f"steps that a checkpoint of {parameters / 1e6:.0f} million parameters blocks", longest)],
        "rounds": rounds,
    }


def _options(folder: Path) -> DDPOptions:
    return harness.one_process(
        folder,
        micro_batch_rows=8,
        global_batch_rows=8,
        learning_rate=1e-4,
        steps=STEPS,
        warmup_steps=5,
        checkpoint_every=EVERY,
        log_every=1,
    )


def _clocked(save: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
    def clocked(*arguments: Any) -> None:
        started = time.perf_counter()
        save(*arguments)
        seconds.append(time.perf_counter() - started)

    return clocked


if __name__ == "__main__":
    harness.main(measure)
