"""Batch sizes and learning rates of a run. Pure functions of numbers."""

import math
from typing import NamedTuple

from settings import UserError


class BatchPlan(NamedTuple):
    """How one global batch is spread."""

    rows_per_rank: int
    accumulation: int
    """Forward passes of each rank in one optimizer step."""


def spread(global_rows: int, micro_rows: int, workers: int) -> BatchPlan:
    """`global_rows` over `workers` ranks in micro-batches of `micro_rows`, as many for each rank.

    global_rows = workers x accumulation x micro_rows, so the batch of an optimizer step, and with it the meaning of
    the learning rate, does not depend on how many workers there are. Where that leaves a remainder, the last ranks
    have micro-batches too many, which count nothing: collectives need as many passes on each rank.
    """
    accumulation = math.ceil(global_rows / (micro_rows * workers))
    return BatchPlan(accumulation * micro_rows, accumulation)


def check_batches(global_rows: int, micro_rows: int, min_workers: int, max_workers: int) -> None:
    """Refuse a global batch that leaves a rank, or a part of a micro-batch, without rows.

    Numbers of workers between the two may compute some micro-batches for nothing (see `spread`), a fixed number not.

    Raises:
        UserError: it names the nearest batches and worker counts that work.
    """
    if min_workers < max_workers:
        if global_rows % micro_rows or global_rows < micro_rows * max_workers:
            raise UserError(
                f"global_batch_rows = {global_rows} has no whole micro-batch of micro_batch_rows = {micro_rows} for "
                f"each of {max_workers} workers; use --global-batch-rows {micro_rows * max_workers}."
            )
        return
    unit = micro_rows * max_workers
    if global_rows % unit == 0:
        return
    sizes = [size for size in (global_rows // unit * unit, (global_rows // unit + 1) * unit) if size]
    counts = _nearest_worker_counts(global_rows, micro_rows, max_workers)
    raise UserError(
        f"global_batch_rows = {global_rows} is no multiple of num_workers x micro_batch_rows = "
        f"{max_workers} x {micro_rows} = {unit}; use --global-batch-rows {_either(sizes)}"
        + (
            f", or --num-workers {_either(counts)}."
            if counts
            else f", or a --micro-batch-rows that divides {global_rows}."
        )
    )


def _nearest_worker_counts(global_rows: int, micro_rows: int, workers: int) -> list[int]:
    """The next smaller and the next larger number of workers that divide the batch."""
    if global_rows % micro_rows:
        return []
    passes = global_rows // micro_rows
    counts = [count for count in range(1, passes + 1) if passes % count == 0]
    return [count for count in counts if count < workers][-1:] + [count for count in counts if count > workers][:1]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def peak_learning_rate(learning_rate: float, global_rows: int, reference_rows: int | None) -> float:
    """The linear scaling rule: k times the batch, k times the rate (Goyal et al. 2017, arXiv:1706.02677, 2.1)."""
    return learning_rate if reference_rows is None else learning_rate * global_rows / reference_rows


def learning_rate_at(step: int, *, peak: float, warmup_steps: int, steps: int, min_ratio: float) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

    Rises linearly to `peak` at step `warmup_steps` (Goyal et al. 2017, 2.2), then falls along half a
    cosine to `min_ratio` x peak at step `steps` (Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5).
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return peak * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2)
