"""Hands a fine-tuning to what started this process: Ray, or torchrun."""

import torch
import torch.distributed as dist

from jobs.training.options import TrainOptions
from jobs.training.strategies import MakeStrategy
from settings import UserError


def fit(options: TrainOptions, make_strategy: MakeStrategy) -> None:
    """Train in this process where torchrun started it, and in workers of Ray Train otherwise."""
    try:
        if dist.is_torchelastic_launched():
            from jobs import torch_run  # each way imports what it needs

            torch_run.fit(options, make_strategy)
        else:
            from jobs import ray_run

            ray_run.fit(options, make_strategy)
    except torch.OutOfMemoryError:
        raise UserError(
            f"the memory of a GPU is full; see what fits with: inv plan {options.model}   It may be a smaller "
            "--micro-batch-rows, --gradient-checkpointing, --lora-rank 16, or finetune_fsdp on more workers."
        ) from None
