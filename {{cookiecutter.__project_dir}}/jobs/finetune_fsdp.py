"""Fine-tunes a language model that PyTorch's FSDP2 shards over the workers."""

from pipeline.ray_support import cli
from pipeline.training.options import FSDPOptions

if __name__ == "__main__":
    cli.parse(FSDPOptions, "train", "fsdp")  # before the slow imports below

from pipeline.training import launch
from pipeline.training.fsdp import FSDP


def main(options: FSDPOptions) -> None:
    """Fine-tune a language model on packed rows, with parameters, gradients and optimizer sharded over the workers."""
    launch.fit(options, FSDP)


if __name__ == "__main__":
    cli.run(main)
