"""Fine-tunes a language model, with the full model on each worker (DistributedDataParallel)."""

from raymill.ray_support import cli
from raymill.training.options import DDPOptions

if __name__ == "__main__":
    cli.parse(DDPOptions, "train")  # before the slow imports below

from raymill.training import launch
from raymill.training.strategies import DDP


def main(options: DDPOptions) -> None:
    """Fine-tune a language model on packed rows, with the full model on each worker."""
    launch.fit(options, DDP)


if __name__ == "__main__":
    cli.run(main)
