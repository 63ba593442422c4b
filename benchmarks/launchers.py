"""Compares the speed of the same training run under Ray Train and torchrun, with two workers of one thread each."""

import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from benchmarks import harness
from benchmarks.report import Result, at_least, at_most
from jobs import finetune_ddp
from raymill import settings
from raymill.demo import assets
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions, TrainOptions
from raymill.training.runtimes import ray_train
from raymill.training.runtimes.runtime import Runtime
from raymill.training.schedule import BatchPlan

ROUNDS = 9
STEPS, FIRST = 20, 5  # the first FIRST steps allocate memory and do not count
CLOCKED_STEPS = 100  # with the log and checkpoint intervals of settings.toml
LLAMA = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4}
IN_A_STEP = ("should_stop", "should_save", "report")  # calls that the trainer makes between steps


def measure() -> Result:
    """Run both launchers in alternation. Then, in one more run, time calls to the runtime."""
    with harness.scratch() as folder, harness.one_ray():
        harness.write_model(folder / "model", 1024, **LLAMA)
        assets.write_data(folder / "data")
        harness.preprocess(folder / "data/*.jsonl", folder / "packed", folder / "model", 128)
        changes = {
            "model": str(folder / "model"),
            "data": str(folder / "packed"),
            "output": str(folder / "runs"),
            "log_every": FIRST,
        }
        ways = {
            "Ray Train": functools.partial(_under_ray, changes),
            "torchrun": functools.partial(_under_torchrun, changes),
        }
        rounds = harness.alternate(ways, ROUNDS, "tokens/s")
        cost = _cost_of_the_runtime({**changes, "log_every": _options({}).log_every})
    return {
        "bars": [
            at_least(
                0.95, "median ratio of tokens/s to torchrun", harness.median_ratio(rounds, "Ray Train", "torchrun")
            ),
            at_most(1, "ms per step in calls of RayTrainRuntime", sum(cost[name] for name in IN_A_STEP)),
        ],
        "rounds": [{"round": number, **made} for number, made in enumerate(rounds, 1)],
        "ms_a_step": cost,
    }


def _under_ray(changes: dict[str, Any]) -> float:
    options = _options(changes | {"steps": STEPS, "name": "ray"})
    finetune_ddp.main(options)
    return _steady_tokens_per_s(options)


def _under_torchrun(changes: dict[str, Any]) -> float:
    options = _options(changes | {"steps": STEPS, "name": "torchrun"})
    asked = changes | {"steps": STEPS, "name": "torchrun", "num_workers": options.num_workers}
    words = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "jobs.finetune_ddp", *words]
    subprocess.run(command, cwd=settings.PROJECT, check=True, stdout=subprocess.DEVNULL)
    return _steady_tokens_per_s(options)


def _steady_tokens_per_s(options: DDPOptions) -> float:
    """Return the speed after the first steps. Delete the run, so that the next run starts from scratch."""
    folder = Path(options.output, options.name)
    rows = [row for row in harness.metrics(folder) if row["step"] > FIRST]
    shutil.rmtree(folder)
    return statistics.harmonic_mean(row["tokens_per_s"] for row in rows)


def _options(changes: dict[str, Any]) -> DDPOptions:
    return settings.load(DDPOptions, "train", profile="local").model_copy(update=changes)


# ------------------------------------------------------------------------------------------ cost of the runtime


def _cost_of_the_runtime(changes: dict[str, Any]) -> dict[str, float]:
    """For each timed method of the runtime, return the milliseconds per step that the slower worker spends in it."""
    options = _options(changes | {"steps": CLOCKED_STEPS, "name": "clocked"})
    ray_train.fit(options, ClockedDDP)
    files = sorted(Path(options.output).glob("calls-*.json"))
    each = [json.loads(file.read_text()) for file in files]
    return {name: max(1000 * seconds[name] / CLOCKED_STEPS for seconds in each) for name in each[0]}


class ClockedDDP(DDP):
    """DDP that also times the trainer's calls to Ray Train."""

    def __init__(self, model: PreTrainedModel, options: TrainOptions, runtime: Runtime, plan: BatchPlan) -> None:
        names = (*IN_A_STEP, "wait")  # `wait` is not in the sum, because it waits for the storage, not for Ray
        seconds = dict.fromkeys(names, 0.0)
        for name in names:
            file = Path(options.output, f"calls-{runtime.rank}.json")
            setattr(runtime, name, _clocked(getattr(runtime, name), name, seconds, file))
        super().__init__(model, options, runtime, plan)


def _clocked(method: Callable[..., Any], name: str, seconds: dict[str, float], file: Path) -> Callable[..., Any]:
    def clocked(*arguments: Any) -> Any:
        started = time.perf_counter()
        returned = method(*arguments)
        seconds[name] += time.perf_counter() - started
        file.write_text(json.dumps(seconds))
        return returned

    return clocked


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; Ray's default is the number of CPUs per worker
    harness.main(measure)
