"""Fine-tunes a language model, with the full model on each worker (DistributedDataParallel)."""

from raymill.job import Job
from raymill.training.options import DDPOptions

JOB = Job(DDPOptions, "train")  # reads the options, before the slow imports below

from raymill.training import launch
from raymill.training.ddp import DDP

STRATEGY = DDP  # a subclass can change the loss, the optimizer and the learning rate: docs/training.md


def main(options: DDPOptions) -> None:
    """Fine-tune a language model on packed rows, with the full model on each worker."""
    launch.fit(options, STRATEGY)


JOB.run(main)
