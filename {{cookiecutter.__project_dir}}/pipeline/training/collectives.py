"""What the ranks decide together; in one process each of these is the identity."""

import torch
import torch.distributed as dist


def total(values: torch.Tensor) -> torch.Tensor:
    """`values` summed over the ranks, on every rank."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def any_rank(condition: bool, device: torch.device) -> bool:
    """Whether the condition holds on one rank at least: so all of them stop, or none."""
    return bool(total(torch.tensor(int(condition), device=device)))
