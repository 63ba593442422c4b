"""Test ZeRO in bf16, the default on AWS: small errors of gradients, and resumed runs. Uses gloo ranks, without Ray.

The options are those of the default job: gradient checkpointing, and several micro-batches per step.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn
from transformers import LlamaConfig, LlamaForCausalLM

import settings
from pipeline.training.deepspeed_zero import ZeRO
from pipeline.training.options import DeepSpeedOptions
from pipeline.training.schedule import BatchPlan

RANKS, PASSES, STEPS = 2, 8, 3
STAGES = (1, 2, 3)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SCALE = 0.1


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what rank 0 saw, by stage."""
    folder = tmp_path_factory.mktemp("zero")
    spawn(_train, (folder,), nprocs=RANKS)
    (folder / "store").unlink()
    spawn(_continue_alone, (folder,), nprocs=1)
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize(("stage", "bound"), [(1, 0.006), (2, 0.003), (3, 0.003)])
def test_gradients_are_added_up_in_fp32(seen: dict[str, dict[str, Any]], stage: int, bound: float) -> None:
    """Stages 2 and 3 add up in fp32. Stage 1 adds up in bf16, which makes an error of 0.45 %.

    `safe_get_full_grad` rounds the gradients to bf16, which alone is an error of 0.25 %.
    """
    assert seen[str(stage)]["error"] < bound


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_repeats_every_bit(seen: dict[str, dict[str, Any]], stage: int) -> None:
    assert seen[str(stage)]["resumed"] == seen[str(stage)]["norms"][-1]


@pytest.mark.parametrize("stage", STAGES)
def test_another_number_of_ranks_continues(seen: dict[str, dict[str, Any]], stage: int) -> None:
    assert seen[str(stage)]["alone"] == pytest.approx(seen[str(stage)]["norms"][-1], rel=0.01)


def _train(rank: int, folder: Path) -> None:
    """Train STEPS steps in each stage, save before the last step, and repeat this step from the checkpoint."""
    ranks.join(rank, RANKS, folder)
    seen: dict[int, dict[str, Any]] = {}
    for stage in STAGES:
        strategy = _strategy(rank, RANKS, stage)
        _accumulate(strategy, rank, RANKS, 0)
        found = seen[stage] = {"error": _error(strategy), "norms": [float(strategy.step(1e-3))]}
        for step in range(1, STEPS):
            if step == STEPS - 1:
                _save(strategy, rank, folder / str(stage))
            _accumulate(strategy, rank, RANKS, step)
            found["norms"].append(float(strategy.step(1e-3)))
        resumed = _strategy(rank, RANKS, stage)
        resumed.load(folder / str(stage), RANKS)
        _accumulate(resumed, rank, RANKS, STEPS - 1)
        found["resumed"] = float(resumed.step(1e-3))
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    distributed.destroy_process_group()


def _continue_alone(rank: int, folder: Path) -> None:
    """Repeat the last step on one rank."""
    ranks.join(rank, 1, folder)
    seen = json.loads((folder / "seen.json").read_text())
    for stage in STAGES:
        strategy = _strategy(rank, 1, stage)
        strategy.load(folder / str(stage), RANKS)
        _accumulate(strategy, rank, 1, STEPS - 1)
        seen[str(stage)]["alone"] = float(strategy.step(1e-3))
    (folder / "seen.json").write_text(json.dumps(seen))
    distributed.destroy_process_group()


def _save(strategy: ZeRO, rank: int, folder: Path) -> None:
    """Write a checkpoint, and merge the ranks' files in one folder, as a runtime does."""
    own = folder / f"rank-{rank}"
    own.mkdir(parents=True)
    strategy.capture()(own)
    distributed.barrier()
    if rank == 0:
        (folder / "zero").mkdir()
        for file in folder.glob("rank-*/zero/*"):
            file.rename(folder / "zero" / file.name)
    distributed.barrier()


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.activation_checkpointing_enable()
    return model.train()


def _strategy(rank: int, world_size: int, stage: int) -> ZeRO:
    options = settings.load(DeepSpeedOptions, "train", "deepspeed", profile="local")
    options = options.model_copy(update={"micro_batch_rows": 1, "precision": "bf16", "zero_stage": stage})
    passes = PASSES * RANKS // world_size
    runtime: Any = ranks.Rank(rank, world_size)
    return ZeRO(_model(), options, runtime, BatchPlan(passes, passes))


def _batch(step: int, number: int) -> dict[str, torch.Tensor]:
    row = torch.randint(SIZES["vocab_size"], (1, 32), generator=torch.Generator().manual_seed(100 * step + number))
    return {"input_ids": row, "labels": row, "position_ids": torch.arange(32)[None]}


def _accumulate(strategy: ZeRO, rank: int, world_size: int, step: int) -> None:
    """Add up this rank's share of the step's micro-batches. DeepSpeed averages over ranks, so SCALE is multiplied."""
    numbers = range(PASSES * RANKS)[rank::world_size]
    for number in numbers:
        strategy.accumulate(_batch(step, number), torch.tensor(SCALE * world_size), number == numbers[-1])


def _error(strategy: ZeRO) -> float:
    """Return the relative error of the first step's gradients. Exact ones are computed in bf16, but added in fp32."""
    from deepspeed.utils import safe_get_full_grad

    model = _model().bfloat16()
    exact = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in model.named_parameters()}
    for number in range(PASSES * RANKS):
        model.zero_grad()
        (model(**_batch(0, number), num_items_in_batch=1, use_cache=False).loss * SCALE).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            exact[name] += parameter.grad
    wrong = {name: safe_get_full_grad(each) - exact[name] for name, each in strategy.model.named_parameters()}
    return float(_norm(wrong) / _norm(exact))


def _norm(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.norm() for tensor in tensors.values()]).norm()
