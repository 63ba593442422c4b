"""Short runs of objectives, in one process or several, and log-probabilities of documents by a plain formula."""

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from raymill import settings
from raymill.data.tokenization import NOT_TRAINED
from raymill.training.ddp import DDP
from raymill.training.deepspeed_zero import ZeRO
from raymill.training.fsdp import FSDP
from raymill.training.options import DDPOptions, DeepSpeedOptions, FSDPOptions, TrainOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.runtimes.torchrun import TorchrunRuntime
from raymill.training.trainer import train

Row = dict[str, float]
WAYS: dict[str, Any] = {
    "ddp": (DDP, DDPOptions, [], {}),
    "fsdp": (FSDP, FSDPOptions, ["fsdp"], {}),
    "zero1": (ZeRO, DeepSpeedOptions, ["deepspeed"], {"zero_stage": 1}),
    "zero2": (ZeRO, DeepSpeedOptions, ["deepspeed"], {"zero_stage": 2}),
    "zero3": (ZeRO, DeepSpeedOptions, ["deepspeed"], {"zero_stage": 3}),
}
EXACT = 2e-5


def options_of(changes: dict[str, Any], way: str = "ddp") -> TrainOptions:
    _, kind, sections, own = WAYS[way]
    loaded = settings.load(kind, "train", *sections, profile="local").model_dump()
    return kind.model_validate(loaded | own | changes)


def alone(changes: dict[str, Any], strategy: type[DDP] = DDP) -> list[Row]:
    options = options_of(changes)
    folder = Path(options.output, options.name)
    train(options, SingleProcess(folder, torch.device("cpu"), options.keep_checkpoints), strategy)
    return logged(folder)


def spread(changes: dict[str, Any], way: str, workers: int = 2) -> list[Row]:
    options = options_of(changes, way)
    folder = Path(options.output, options.name)
    folder.mkdir(exist_ok=True)
    ranks.run(_rank, (workers, folder / f"meeting-{options.stop_after}", options, way), workers)
    return logged(folder)


def _rank(number: int, workers: int, meeting: Path, options: TrainOptions, way: str) -> None:
    os.environ |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(workers)}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=workers)
    runtime = TorchrunRuntime(Path(options.output, options.name), torch.device("cpu"), options.keep_checkpoints)
    train(options, runtime, WAYS[way][0])
    dist.destroy_process_group()


def logged(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def documents(batch: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens and the labels of each document with a trained token, without padding or packing."""
    for ids, labels, positions in zip(*(batch[name] for name in ("input_ids", "labels", "position_ids")), strict=True):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(ids)]
        for start, stop in pairwise(starts):
            if (labels[start:stop] != NOT_TRAINED).any():
                yield ids[start:stop], labels[start:stop]


def plain_logps(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log-probability and the number of trained tokens of each document."""
    found = []
    for ids, labels in documents(batch):
        logps = model(ids[None]).logits[0, :-1].log_softmax(-1)
        trained = labels[1:] != NOT_TRAINED
        picked = logps.gather(1, ids[1:, None]).squeeze(1)
        found.append(torch.stack([picked[trained].sum(), trained.sum()]))
    return torch.stack(found)[:, 0], torch.stack(found)[:, 1]


def settings_of(model: Path, data: Path, output: Path, **own: Any) -> dict[str, Any]:
    """Return changes to the settings of the local profile for a short run."""
    length = {"steps": 8, "warmup_steps": 0, "eval_every": 4, "checkpoint_every": 4}
    batch = {"global_batch_rows": 8, "micro_batch_rows": 2, "learning_rate": 1e-3}
    return {"model": str(model), "data": str(data), "output": str(output)} | length | batch | own


def pairs() -> list[dict[str, Any]]:
    """Return pairs of a good and a bad answer of different lengths."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What is number {n}?"}],
            "chosen": [{"role": "assistant", "content": f"It is {n}. " + "Sure. " * (n % 5)}],
            "rejected": [{"role": "assistant", "content": "No idea. " * (1 + n % 3)}],
        }
        for n in range(150)
    ]


def plain_adamw(model: PreTrainedModel) -> torch.optim.AdamW:
    """Return AdamW with the settings of the local profile."""
    matrices = [one for one in model.parameters() if one.dim() >= 2]
    vectors = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))
