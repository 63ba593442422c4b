"""Fine-tunes a language model that is sharded over the workers: DeepSpeed's ZeRO."""

from jobs import cli
from jobs.training.options import DeepSpeedOptions

if __name__ == "__main__":
    cli.parse(DeepSpeedOptions, "train", "deepspeed")  # before the imports below, which take seconds

import json
from functools import partial
from pathlib import Path

from jobs import launch
from jobs.training.zero import ZeRO

CONFIG = Path(__file__).with_suffix(".json")


def main(options: DeepSpeedOptions) -> None:
    """Fine-tune a language model on packed rows, its optimizer, gradients or parameters sharded over the workers."""
    launch.fit(options, partial(ZeRO, json.loads(CONFIG.read_text())))


if __name__ == "__main__":
    cli.run(main)
