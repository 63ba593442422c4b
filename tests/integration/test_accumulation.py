"""Test what DDP and FSDP keep in memory between micro-batches and after an evaluation, on two ranks without Ray."""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from raymill import settings
from raymill.training.dataset import Batch
from raymill.training.ddp import DDP
from raymill.training.fsdp import FSDP
from raymill.training.options import DDPOptions, FSDPOptions
from raymill.training.schedule import BatchPlan
from raymill.training.strategy import Strategy

RANKS = 2
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what rank 0 observed."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks.run(_observe, (folder,), RANKS)
    return json.loads((folder / "seen.json").read_text())


def test_ddp_accumulates_in_its_buckets(seen: dict[str, Any]) -> None:
    """Gradients outside the buckets would take as much memory as another fp32 copy of the model."""
    assert seen["gradients in other memory"] == 0


def test_fsdp_holds_only_its_shard_of_the_gradients(seen: dict[str, Any]) -> None:
    assert seen["gradients held by a rank"] == pytest.approx(seen["parameters"] / RANKS, rel=0.05)


def test_fsdp_accumulates_the_same_gradients_as_ddp(seen: dict[str, Any]) -> None:
    assert seen["FSDP's norm"] == pytest.approx(seen["DDP's norm"], rel=1e-5)


def test_fsdp_exports_all_weights_after_an_evaluation(seen: dict[str, Any]) -> None:
    """Without `reshard_after_forward`, the evaluation leaves the parameters gathered."""
    assert seen["exported after an evaluation"] == seen["parameters"]


def _observe(rank: int, folder: Path) -> None:
    ranks.join(rank, RANKS, folder)
    ddp, fsdp = _strategy(DDP, DDPOptions, rank), _strategy(FSDP, FSDPOptions, rank)
    seen: dict[str, Any] = {"parameters": ddp.model.num_parameters()}
    for strategy in (ddp, ddp, fsdp, fsdp):  # twice, because DDP rebuilds its buckets in the second step
        _accumulate(strategy, rank, 2)
        strategy.step(1e-3)
    buckets = _gradient_addresses(ddp)
    _accumulate(ddp, rank, 1, last=False)
    seen["gradients in other memory"] = len(_gradient_addresses(ddp) - buckets)
    _accumulate(fsdp, rank, 1, last=False)
    shards = [gradient.to_local() for gradient in _gradients(fsdp) if isinstance(gradient, DTensor)]
    seen["gradients held by a rank"] = sum(shard.numel() for shard in shards)
    for name, strategy in (("DDP", ddp), ("FSDP", fsdp)):
        _accumulate(strategy, rank, 1)
        norm = strategy.step(1e-3)
        seen[f"{name}'s norm"] = float(norm)
    unsharding = _strategy(FSDP, FSDPOptions, rank, reshard_after_forward=False)
    with torch.no_grad():
        unsharding.summed_loss(_batch(rank, 0))
    seen["exported after an evaluation"] = sum(weight.numel() for _, weight in unsharding.gather())
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    ranks.leave()


def _strategy(kind: Any, options_type: Any, rank: int, **changes: Any) -> Strategy:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    sections = ("train", "fsdp") if kind is FSDP else ("train",)
    options = settings.load(options_type, *sections, profile="local").model_copy(update=changes)
    return kind(model, options, ranks.Rank(rank, RANKS), BatchPlan(2, 2))


def _accumulate(strategy: Strategy, rank: int, count: int, last: bool = True) -> None:
    """Add the gradients of `count` micro-batches. With `last`, the final one is the last of its optimizer step."""
    for number in range(count):
        strategy.accumulate(_batch(rank, number), torch.tensor(0.1), last and number == count - 1)


def _batch(rank: int, number: int) -> Batch:
    """Return one row that differs for each rank and number."""
    row = (torch.arange(16)[None] * (rank + 2) + number) % SIZES["vocab_size"]
    return {"input_ids": row, "labels": row, "position_ids": torch.arange(16)[None]}


def _gradients(strategy: Strategy) -> list[torch.Tensor]:
    return [parameter.grad for parameter in strategy.model.parameters() if parameter.grad is not None]


def _gradient_addresses(strategy: Strategy) -> set[int]:
    return {gradient.data_ptr() for gradient in _gradients(strategy)}
