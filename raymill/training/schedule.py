"""Computes the batch sizes and learning rates of a run."""

import math
from typing import Literal, NamedTuple

from raymill.errors import UserError

Schedule = Literal["cosine", "linear", "constant", "wsd"]


class BatchPlan(NamedTuple):
    """How one global batch is split over the ranks."""

    rows_per_rank: int
    accumulation: int
    """Forward passes of each rank per optimizer step."""


def spread(global_rows: int, micro_rows: int, workers: int) -> BatchPlan:
    """Split `global_rows` into micro-batches of `micro_rows`, with the same number for each of `workers` ranks.

    With global_rows = workers x accumulation x micro_rows, the batch of an optimizer step does not depend on the number
    of workers, so the same learning rate fits. If `global_rows` does not divide evenly, the last ranks get extra
    micro-batches that do not count, because collectives need the same number of passes on each rank.
    """
    accumulation = math.ceil(global_rows / (micro_rows * workers))
    return BatchPlan(accumulation * micro_rows, accumulation)


def check_batches(global_rows: int, micro_rows: int, min_workers: int, max_workers: int) -> None:
    """Refuse a global batch that leaves a rank, or part of a micro-batch, without rows.

    The micro-batches must divide evenly among a fixed number of workers. With a range, `spread` may add micro-batches.

    Raises:
        UserError: the batch is refused. The message names the nearest batch sizes and worker counts that work.
    """
    if min_workers < max_workers:
        if global_rows % micro_rows or global_rows < micro_rows * max_workers:
            raise UserError(
                f"global_batch_rows = {global_rows} does not give each of {max_workers} workers whole micro-batches of "
                f"micro_batch_rows = {micro_rows}; use --global-batch-rows {micro_rows * max_workers}."
            )
        return
    unit = micro_rows * max_workers
    if global_rows % unit == 0:
        return
    sizes = [size for size in (global_rows // unit * unit, (global_rows // unit + 1) * unit) if size]
    counts = _nearest_worker_counts(global_rows, micro_rows, max_workers)
    raise UserError(
        f"global_batch_rows = {global_rows} is not a multiple of num_workers x micro_batch_rows = "
        f"{max_workers} x {micro_rows} = {unit}; use --global-batch-rows {_either(sizes)}"
        + (
            f", or --num-workers {_either(counts)}."
            if counts
            else f", or a --micro-batch-rows that divides {global_rows}."
        )
    )


def _nearest_worker_counts(global_rows: int, micro_rows: int, workers: int) -> list[int]:
    """Return the nearest smaller and the nearest larger number of workers that divide the batch."""
    if global_rows % micro_rows:
        return []
    passes = global_rows // micro_rows
    counts = [count for count in range(1, passes + 1) if passes % count == 0]
    return [count for count in counts if count < workers][-1:] + [count for count in counts if count > workers][:1]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def peak_learning_rate(learning_rate: float, global_rows: int, reference_rows: int | None) -> float:
    """Return the learning rate according to the linear scaling rule: k times the batch size needs k times the rate.

    Goyal et al. 2017, arXiv:1706.02677, section 2.1. Without `reference_rows` the rate is not scaled.
    """
    return learning_rate if reference_rows is None else learning_rate * global_rows / reference_rows


def steps_of(epochs: float, rows: int, global_rows: int) -> int:
    """Return the number of steps in which `epochs` passes over `rows` rows are complete."""
    return max(1, math.ceil(epochs * rows / global_rows))


def learning_rate_at(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    steps: int,
    min_ratio: float,
    schedule: Schedule = "cosine",
    decay_share: float = 0.1,
) -> float:
    """Return the learning rate of an optimizer step. The first step is 1.

    The rate rises linearly to `peak` at step `warmup_steps` (Goyal et al. 2017, section 2.2). Then, unless it is
    constant, it falls to `min_ratio` x `peak` at step `steps`: along half a cosine (Loshchilov and Hutter 2016,
    arXiv:1608.03983, eq. 5), linearly, or, with wsd, linearly in the last `decay_share` of all steps.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    begin = max(warmup_steps, round(steps * (1 - decay_share))) if schedule == "wsd" else warmup_steps
    if schedule == "constant" or step <= begin:
        return peak
    progress = (step - begin) / (steps - begin)
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return peak * (min_ratio + (1 - min_ratio) * left)
