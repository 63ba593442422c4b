"""Fine-tunes a language model that is sharded over the workers: DeepSpeed's ZeRO."""

import json
from functools import partial
from pathlib import Path

from jobs import cli, launch
from jobs.training.options import DeepSpeedOptions
from jobs.training.zero import ZeRO

CONFIG = Path(__file__).with_suffix(".json")


def main(options: DeepSpeedOptions) -> None:
    """Fine-tune a language model on packed rows, its optimizer, gradients or parameters sharded over the workers."""
    launch.fit(options, partial(ZeRO, json.loads(CONFIG.read_text())))


if __name__ == "__main__":
    cli.run(main, DeepSpeedOptions, "train", "deepspeed")
