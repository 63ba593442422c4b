"""Fine-tunes a language model that is sharded over the workers: PyTorch's FSDP2."""

from pipeline.ray_support import cli
from pipeline.training.options import FSDPOptions

if __name__ == "__main__":
    cli.parse(FSDPOptions, "train", "fsdp")  # before the imports below, which take seconds

from functools import partial

from pipeline.training import launch
from pipeline.training.fsdp import FSDP


def main(options: FSDPOptions) -> None:
    """Fine-tune a language model on packed rows, its parameters, gradients and optimizer sharded over the workers."""
    launch.fit(options, partial(FSDP, options.reshard_after_forward))


if __name__ == "__main__":
    cli.run(main)
