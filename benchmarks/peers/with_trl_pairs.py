"""Runs TRL's DPOTrainer on the given rows. Returns the metrics and the time of each step."""

import json
import time
from typing import Any

import torch
from datasets import Dataset
from exchange import answer
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer


class Clock(TrainerCallback):
    """Records the metrics and the end time of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.ended = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ended = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.steps.append({name: value for name, value in logs.items() if isinstance(value, float | int)})
            self.steps[-1]["seconds"] = self.ended


class Counter:
    """Counts the tokens of batches, and those of them that are padding."""

    def __init__(self, collate: Any) -> None:
        self.collate, self.tokens, self.padding = collate, 0, 0

    def __call__(self, rows: list[Any]) -> Any:
        batch = self.collate(rows)
        for name, mask in batch.items():
            if name.endswith("attention_mask") and "prompt" not in name:
                self.tokens += mask.numel()
                self.padding += int((mask == 0).sum())
        return batch


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Train, and return `steps` and the share of `padding`.

    Args:
        asked: `model`, `rows` (a JSONL file), `config` (arguments of DPOConfig) and `threads`.
    """
    torch.set_num_threads(asked["threads"])
    with open(asked["rows"], encoding="utf-8") as lines:
        rows = Dataset.from_list([json.loads(line) for line in lines])
    clock = Clock()
    trainer = DPOTrainer(
        model=asked["model"],
        args=DPOConfig(**asked["config"]),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        callbacks=[clock],
    )
    trainer.data_collator = counter = Counter(trainer.data_collator)
    trainer.train()
    return {"steps": clock.steps, "padding": counter.padding / max(1, counter.tokens)}


if __name__ == "__main__":
    answer(main)
