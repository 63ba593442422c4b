"""Measures the loss on the rows that `preprocess` held out."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator

import torch

from raymill.data.tokenization import NOT_TRAINED
from raymill.errors import UserError
from raymill.training.collectives import total
from raymill.training.dataset import Batch, PackedRows
from raymill.training.objectives import Objective
from raymill.training.runtimes.runtime import Metrics, Runtime

LARGEST_EXPONENT = math.log(sys.float_info.max)


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

    Numbers that are not finite are printed and left out, so that they never count as the best ones.

    Every rank runs the same number of forward passes, because a forward pass may run collectives. Rows beyond the end
    of the split do not count.

    Args:
        rows: the rows of all ranks.
        micro_rows: rows per forward pass of one rank.
        summed_loss: returns the sums of the objective, as a vector, for a batch on the rank's device.
        set_baseline: see `Strategy.set_baseline`.

    Raises:
        UserError: the objective ranks models by a metric that it does not have. All ranks raise it.
    """
    if set_baseline:
        set_baseline(_batches(rows, micro_rows, runtime))
    sums = torch.zeros(2, objective.size, dtype=torch.float64, device=runtime.device)
    for batch in _batches(rows, micro_rows, runtime):
        sums += torch.stack([summed_loss(batch).double(), objective.counts(batch).double()])
    found, counts = total(sums)
    values = {f"eval_{name}": value for name, value in objective.named((found / counts).tolist()).items()}
    if objective.best_metric not in values:
        raise UserError(
            f"{type(objective).__name__} ranks models by {objective.best_metric}, but an evaluation has only "
            f"{', '.join(values)}. Set best_metric of the class to one of them."
        )
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    if runtime.rank == 0 and (broken := values.keys() - finite.keys()):
        shown = ", ".join(f"{name} is {values[name]}" for name in values if name in broken)
        print(f"warning: the evaluation on held-out rows is not finite ({shown}); it is left out", flush=True)
    found_perplexity = perplexity(finite.get("eval_loss", math.nan)) if objective.has_perplexity else None
    return finite if found_perplexity is None else finite | {"eval_perplexity": found_perplexity}


def perplexity(loss: float) -> float | None:
    """Return exp(loss), or None if the loss is not finite or above about 709, where exp(loss) exceeds all floats."""
    return math.exp(loss) if loss < LARGEST_EXPONENT else None


def _batches(rows: PackedRows, micro_rows: int, runtime: Runtime) -> Iterator[Batch]:
    """Yield this rank's micro-batches. All ranks have the same number of them."""
    for number in range(math.ceil(len(rows) / (micro_rows * runtime.world_size))):
        first = (number * runtime.world_size + runtime.rank) * micro_rows
        batch = {name: column.to(runtime.device) for name, column in rows.read(first, micro_rows).items()}
        batch["labels"][max(0, len(rows) - first) :] = NOT_TRAINED
        yield batch
