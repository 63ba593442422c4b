"""Hands a fine-tuning to what started this process: Ray, or torchrun."""

import torch
import torch.distributed as dist

from pipeline.training.options import TrainOptions
from pipeline.training.strategies import MakeStrategy
from settings import UserError


def fit(options: TrainOptions, make_strategy: MakeStrategy) -> None:
    """Train in this process where torchrun started it, and in workers of Ray Train otherwise."""
    try:
        if dist.is_torchelastic_launched():
            from pipeline.training.runtimes import torchrun  # each way imports what it needs

            torchrun.fit(options, make_strategy)
        else:
            from pipeline.training.runtimes import ray_train

            ray_train.fit(options, make_strategy)
    except torch.OutOfMemoryError:
        raise UserError(
            f"the memory of a GPU is full; see what fits with: inv plan {options.model}   It may be a smaller "
            "--micro-batch-rows, --gradient-checkpointing, --lora-rank 16, or finetune_fsdp on more workers."
        ) from None
