"""Fine-tunes a language model with each worker holding the whole of it: DistributedDataParallel."""

from jobs import cli
from jobs.training.options import DDPOptions

if __name__ == "__main__":
    cli.parse(DDPOptions, "train")  # before the imports below, which take seconds

from jobs import launch
from jobs.training.strategies import DDP


def main(options: DDPOptions) -> None:
    """Fine-tune a language model on packed rows, the whole model on each worker."""
    launch.fit(options, DDP)


if __name__ == "__main__":
    cli.run(main)
