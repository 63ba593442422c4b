"""Fine-tunes a language model that is sharded over the workers with DeepSpeed's ZeRO."""

from pipeline.ray_support import cli
from pipeline.training.options import DeepSpeedOptions

if __name__ == "__main__":
    cli.parse(DeepSpeedOptions, "train", "deepspeed")  # before the slow imports below

from pipeline.training import launch
from pipeline.training.deepspeed_zero import ZeRO


def main(options: DeepSpeedOptions) -> None:
    """Fine-tune a language model on packed rows, and shard its training state over the workers with ZeRO."""
    launch.fit(options, ZeRO)


if __name__ == "__main__":
    cli.run(main)
