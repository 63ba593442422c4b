"""Collective operations. In a single process, each returns its input."""

import torch
import torch.distributed as dist


def total(values: torch.Tensor) -> torch.Tensor:
    """Sum `values` over all ranks, in place, and return them."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def largest(value: float, device: torch.device) -> float:
    """Return the largest value that any rank passed. All ranks get the same result."""
    values = torch.tensor(value, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.item()


def is_equal(value: int, device: torch.device) -> bool:
    """Return whether all ranks passed the same value. All ranks get the same result."""
    first = torch.tensor(value, device=device)
    if dist.is_initialized():
        dist.broadcast(first, src=0)
    return not any_rank(first.item() != value, device)


def any_rank(condition: bool, device: torch.device) -> bool:
    """Return whether the condition holds on at least one rank. All ranks get the same result."""
    return bool(total(torch.tensor(int(condition), device=device)))
