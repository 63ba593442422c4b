"""Starts a fine-tuning run: under Ray, or in this process if torchrun or `inv fit` started it."""

import torch
import torch.distributed as dist

from raymill.errors import UserError
from raymill.job_context import JobContext
from raymill.training import failures, optimizers
from raymill.training.options import TrainOptions
from raymill.training.strategy import MakeStrategy


def fit(options: TrainOptions, make_strategy: MakeStrategy) -> None:
    """Train with a strategy: in this process under torchrun and `inv fit`, otherwise in Ray Train workers."""
    optimizers.check_installed(options)
    try:
        if dist.is_torchelastic_launched():
            from raymill.training.runtimes import torchrun  # imported late: each runtime has its own dependencies

            torchrun.fit(options, make_strategy)
        elif JobContext.current().fit_report:
            from raymill.training.runtimes import fake_gpu

            fake_gpu.fit(options, make_strategy)
        else:
            from raymill.training.runtimes import ray_train

            ray_train.fit(options, make_strategy)
    except torch.OutOfMemoryError as error:
        raise UserError(failures.describe(error, options)) from None
