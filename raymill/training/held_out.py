"""Measures the loss on the rows that `preprocess` held out."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch

from raymill.data.tokenization import NOT_TRAINED
from raymill.training.collectives import total
from raymill.training.dataset import Batch, PackedRows
from raymill.training.objectives import Objective
from raymill.training.runtimes.runtime import Metrics, Runtime


@torch.no_grad()
def evaluate(
    rows: PackedRows,
    micro_rows: int,
    runtime: Runtime,
    objective: Objective,
    summed_loss: Callable[[Batch], torch.Tensor],
    set_baseline: Callable[[Iterable[Batch]], None] | None = None,
) -> Metrics:
    """Return the loss and the metrics over all evaluation rows, and the perplexity of answers to learn.

    Every rank runs the same number of forward passes, because a forward pass may run collectives. Rows beyond the end
    of the split do not count.

    Args:
        rows: the rows of all ranks.
        micro_rows: rows per forward pass of one rank.
        summed_loss: returns the sums of the objective, as a vector, for a batch on the rank's device.
        set_baseline: see `Strategy.set_baseline`.
    """
    if set_baseline:
        set_baseline(_batches(rows, micro_rows, runtime))
    sums = torch.zeros(2, objective.size, dtype=torch.float64, device=runtime.device)
    for batch in _batches(rows, micro_rows, runtime):
        sums += torch.stack([summed_loss(batch).double(), objective.counts(batch).double()])
    found, counts = total(sums)
    values = objective.named((found / counts).tolist())
    perplexity = {"perplexity": math.exp(values["loss"])} if objective.has_perplexity else {}
    return {f"eval_{name}": value for name, value in (values | perplexity).items()}


def _batches(rows: PackedRows, micro_rows: int, runtime: Runtime) -> Iterator[Batch]:
    """Yield this rank's micro-batches. All ranks have the same number of them."""
    for number in range(math.ceil(len(rows) / (micro_rows * runtime.world_size))):
        first = (number * runtime.world_size + runtime.rank) * micro_rows
        batch = {name: column.to(runtime.device) for name, column in rows.read(first, micro_rows).items()}
        batch["labels"][max(0, len(rows) - first) :] = NOT_TRAINED
        yield batch
