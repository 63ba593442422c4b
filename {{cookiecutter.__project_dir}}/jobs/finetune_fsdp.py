"""Fine-tunes a language model that PyTorch's FSDP2 shards over the workers."""

from raymill.job import Job
from raymill.training.options import FSDPOptions

JOB = Job(FSDPOptions, "train", "fsdp")  # reads the options, before the slow imports below

from raymill.training import launch
from raymill.training.fsdp import FSDP

STRATEGY = FSDP  # a subclass can change the loss, the optimizer and the learning rate: docs/training.md


def main(options: FSDPOptions) -> None:
    """Fine-tune a language model on packed rows, with parameters, gradients and optimizer sharded over the workers."""
    launch.fit(options, STRATEGY)


JOB.run(main)
