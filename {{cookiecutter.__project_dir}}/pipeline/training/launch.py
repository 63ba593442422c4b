"""Starts a fine-tuning run: under Ray, or in this process if torchrun or `inv fit` started it."""

import os

import torch
import torch.distributed as dist

from pipeline.training import failures
from pipeline.training.options import TrainOptions
from pipeline.training.strategies import MakeStrategy
from settings import UserError


def fit(options: TrainOptions, make_strategy: MakeStrategy) -> None:
    """Train with a strategy: in this process under torchrun and `inv fit`, otherwise in Ray Train workers."""
    try:
        if dist.is_torchelastic_launched():
            from pipeline.training.runtimes import torchrun  # imported late: each runtime has its own dependencies

            torchrun.fit(options, make_strategy)
        elif "FIT_REPORT" in os.environ:
            from pipeline.training.runtimes import fake_gpu

            fake_gpu.fit(options, make_strategy)
        else:
            from pipeline.training.runtimes import ray_train

            ray_train.fit(options, make_strategy)
    except torch.OutOfMemoryError as error:
        raise UserError(failures.describe(error, options)) from None
