"""Runs TRL's SFTTrainer on the given rows. Returns the loss and the time of each step, or only the rows' labels."""

import json
import time
from typing import Any

import torch
from datasets import Dataset
from exchange import answer
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """Records the loss and the end time of each step, and the number of tokens until then, without padding."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.steps.append({"loss": logs["loss"], "seconds": time.perf_counter(), "tokens": logs["num_tokens"]})


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Train and return `steps`, or only prepare the rows and return their `labels`.

    Args:
        asked: `model`, `rows` (a JSONL file), `config` (arguments of SFTConfig), `threads` and `trains`.
    """
    torch.set_num_threads(asked["threads"])
    with open(asked["rows"], encoding="utf-8") as lines:
        rows = Dataset.from_list([json.loads(line) for line in lines])
    clock = Clock()
    trainer = SFTTrainer(
        model=asked["model"],
        args=SFTConfig(**asked["config"]),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        callbacks=[clock],
    )
    if asked["trains"]:
        trainer.train()
        return {"steps": clock.steps}
    return {"labels": list(trainer.train_dataset["labels"])}


if __name__ == "__main__":
    answer(main)
