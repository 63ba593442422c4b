"""Fine-tunes a language model that is sharded over the workers: DeepSpeed's ZeRO."""

from pipeline.ray_support import cli
from pipeline.training.options import DeepSpeedOptions

if __name__ == "__main__":
    cli.parse(DeepSpeedOptions, "train", "deepspeed")  # before the imports below, which take seconds

import json
from functools import partial

import settings
from pipeline.training import launch
from pipeline.training.deepspeed_zero import ZeRO

CONFIG = settings.PROJECT / "pipeline" / "training" / "deepspeed.json"


def main(options: DeepSpeedOptions) -> None:
    """Fine-tune a language model on packed rows, its optimizer, gradients or parameters sharded over the workers."""
    launch.fit(options, partial(ZeRO, json.loads(CONFIG.read_text())))


if __name__ == "__main__":
    cli.run(main)
