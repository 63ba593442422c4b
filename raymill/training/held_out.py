"""Measures the loss on the rows that `preprocess` held out."""

import math
from collections.abc import Callable

import torch

from raymill.data.tokenization import NOT_TRAINED
from raymill.training.collectives import total
from raymill.training.dataset import Batch, PackedRows, trained_tokens
from raymill.training.runtimes.runtime import Metrics, Runtime


@torch.no_grad()
def evaluate(
    rows: PackedRows, micro_rows: int, runtime: Runtime, summed_loss: Callable[[Batch], torch.Tensor]
) -> Metrics:
    """Return the loss and the perplexity over all evaluation tokens.

    Every rank runs the same number of forward passes, because a forward pass may run collectives. Rows beyond the end
    of the split do not count.

    Args:
        rows: the rows of all ranks.
        micro_rows: rows per forward pass of one rank.
        summed_loss: returns the loss summed over the trained tokens of a batch on the rank's device.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    for number in range(math.ceil(len(rows) / (micro_rows * runtime.world_size))):
        first = (number * runtime.world_size + runtime.rank) * micro_rows
        batch = {name: column.to(runtime.device) for name, column in rows.read(first, micro_rows).items()}
        batch["labels"][max(0, len(rows) - first) :] = NOT_TRAINED
        sums += torch.stack([summed_loss(batch).double(), trained_tokens(batch).double()])
    loss, tokens = total(sums).tolist()
    return {"eval_loss": loss / tokens, "eval_perplexity": math.exp(loss / tokens)}
