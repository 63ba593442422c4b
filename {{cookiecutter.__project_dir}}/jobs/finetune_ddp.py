"""Fine-tunes a language model, with the full model on each worker (DistributedDataParallel)."""

from pipeline.ray_support import cli
from pipeline.training.options import DDPOptions

if __name__ == "__main__":
    cli.parse(DDPOptions, "train")  # before the slow imports below

from pipeline.training import launch
from pipeline.training.strategies import DDP


def main(options: DDPOptions) -> None:
    """Fine-tune a language model on packed rows, with the full model on each worker."""
    launch.fit(options, DDP)


if __name__ == "__main__":
    cli.run(main)
