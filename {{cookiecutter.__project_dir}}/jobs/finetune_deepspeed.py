"""Fine-tunes a language model, with its training state sharded over the workers by DeepSpeed's ZeRO."""

from raymill.ray_support import cli
from raymill.training.options import DeepSpeedOptions

if __name__ == "__main__":
    cli.parse(DeepSpeedOptions, "train", "deepspeed")  # before the slow imports below

from raymill.training import launch
from raymill.training.deepspeed_zero import ZeRO


def main(options: DeepSpeedOptions) -> None:
    """Fine-tune a language model on packed rows, with its training state sharded over the workers by ZeRO."""
    launch.fit(options, ZeRO)


if __name__ == "__main__":
    cli.run(main)
