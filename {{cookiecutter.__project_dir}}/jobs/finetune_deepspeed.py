"""Fine-tunes a language model, with its training state sharded over the workers by DeepSpeed's ZeRO."""

from raymill.job import Job
from raymill.training.options import DeepSpeedOptions

JOB = Job(DeepSpeedOptions, "train", "deepspeed")  # reads the options, before the slow imports below

from raymill.training import launch
from raymill.training.deepspeed_zero import ZeRO

STRATEGY = ZeRO  # a subclass can change the loss, the optimizer and the learning rate: docs/training.md


def main(options: DeepSpeedOptions) -> None:
    """Fine-tune a language model on packed rows, with its training state sharded over the workers by ZeRO."""
    launch.fit(options, STRATEGY)


JOB.run(main)
