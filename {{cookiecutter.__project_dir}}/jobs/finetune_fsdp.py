"""Fine-tunes a language model that PyTorch's FSDP2 shards over the workers."""

from raymill.ray_support import cli
from raymill.training.options import FSDPOptions

if __name__ == "__main__":
    cli.parse(FSDPOptions, "train", "fsdp")  # before the slow imports below

from raymill.training import launch
from raymill.training.fsdp import FSDP


def main(options: FSDPOptions) -> None:
    """Fine-tune a language model on packed rows, with parameters, gradients and optimizer sharded over the workers."""
    launch.fit(options, FSDP)


if __name__ == "__main__":
    cli.run(main)
