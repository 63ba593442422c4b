"""Test that the losses of each strategy, number of ranks and precision agree with those of a single process.

As under torchrun, each rank is a process. The processes are forked from one that has already imported everything.
"""

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import packed_rows
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from raymill import environment, settings
from raymill.data.tokenization import NOT_TRAINED
from raymill.training.dataset import Batch
from raymill.training.ddp import DDP
from raymill.training.deepspeed_zero import ZeRO
from raymill.training.fsdp import FSDP
from raymill.training.options import DDPOptions, DeepSpeedOptions, FSDPOptions, TrainOptions
from raymill.training.packed_attention import model_inputs
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.runtimes.torchrun import TorchrunRuntime
from raymill.training.strategy import MakeStrategy, Strategy
from raymill.training.trainer import train

STEPS = 30  # the first steps of the local profile's schedule, which the demo uses
EXACT, ELASTIC, BF16, MUON, EIGHT_BITS = 1e-5, 1e-4, 1e-2, 1e-4, 2e-2


Row = dict[str, float]
Way = Callable[[dict[str, Any]], tuple[TrainOptions, MakeStrategy]]


def _ddp(changes: dict[str, Any]) -> tuple[TrainOptions, MakeStrategy]:
    return settings.load(DDPOptions, "train", profile="local").model_copy(update=changes), DDP


def _fsdp(changes: dict[str, Any]) -> tuple[TrainOptions, MakeStrategy]:
    options = settings.load(FSDPOptions, "train", "fsdp", profile="local").model_copy(update=changes)
    return options, FSDP


def _zero(stage: int, offload: bool, changes: dict[str, Any]) -> tuple[TrainOptions, MakeStrategy]:
    own = {"zero_stage": stage, "offload_optimizer": offload}
    options = settings.load(DeepSpeedOptions, "train", "deepspeed", profile="local").model_copy(update=changes | own)
    return options, ZeRO


WAYS: dict[str, Way] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "zero1": partial(_zero, 1, False),
    "zero2-offload": partial(_zero, 2, True),
    "zero3": partial(_zero, 3, False),
}


class Own(Strategy):
    """A user's loss, optimizer and learning rate."""

    def loss(self, batch: Batch) -> torch.Tensor:
        logits = self.module(**model_inputs(self.model, batch), use_cache=False).logits[:, :-1]
        following = batch["labels"][:, 1:].long()
        return 1.5 * functional.cross_entropy(
            logits.transpose(1, 2), following, ignore_index=NOT_TRAINED, reduction="sum"
        )

    def make_optimizer(self, model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], momentum=0.9)

    @staticmethod
    def learning_rate(options: TrainOptions, step: int) -> float:
        return 0.1 / step**0.5


class OwnDDP(Own, DDP): ...


class OwnFSDP(Own, FSDP): ...


class OwnZeRO(Own, ZeRO): ...


OWN: dict[MakeStrategy, MakeStrategy] = {DDP: OwnDDP, FSDP: OwnFSDP, ZeRO: OwnZeRO}
BY_MACHINE: dict[str, dict[str, bool]] = {"fsdp": {"hybrid_shard": True}, "zero3": {"hpz": True}}
"""Settings that shard parameters within each machine, by strategy."""


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return changes to the settings of the local profile."""
    data, model = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("model")
    packed_rows.write_model(model, assets, num_hidden_layers=3)
    packed_rows.write(data, packed_rows.tokenize(assets, model, 128), model, 128, train=[60, 40], evaluated=7)
    output = str(tmp_path_factory.mktemp("runs"))
    return {
        "model": str(model),
        "data": str(data),
        "output": output,
        "learning_rate": 1e-3,  # at the demo's 3e-3, rounding errors grow to 1.3e-5 in 30 steps
        "stop_after": STEPS,
        "checkpoint_every": 10,
    }


@pytest.fixture(scope="module")
def alone(changes: dict[str, Any]) -> list[Row]:
    """Train in one process that accumulates micro-batches."""
    return _alone(changes | {"name": "alone"})


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_agree_with_one_process(way: str, alone: list[Row], changes: dict[str, Any]) -> None:
    rows = _spread(WAYS[way], 2, changes | {"name": way})
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
    _assert_same_result(rows, way, alone, changes)


@pytest.fixture(scope="module")
def own_alone(changes: dict[str, Any]) -> list[Row]:
    return _alone(changes | {"name": "own-alone"}, OwnDDP)


@pytest.mark.parametrize(
    "way",
    ["fsdp", *(pytest.param(way, marks=pytest.mark.nightly) for way in WAYS if way != "fsdp")],
)
def test_a_users_loss_optimizer_and_learning_rate_work_with_each_strategy(
    way: str, own_alone: list[Row], alone: list[Row], changes: dict[str, Any]
) -> None:
    def own(changes: dict[str, Any]) -> tuple[TrainOptions, MakeStrategy]:
        options, strategy = WAYS[way](changes)
        return options, OWN[strategy]

    for stop in (10, STEPS):  # the second run resumes, also the optimizer's momentum
        rows = _spread(own, 2, changes | {"name": f"own-{way}", "stop_after": stop})
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert rows[0]["loss"] == pytest.approx(1.5 * alone[0]["loss"])
    assert rows[3]["lr"] == pytest.approx(0.05)
    _assert_close(rows, own_alone, EXACT)


@pytest.fixture(scope="module")
def whole(changes: dict[str, Any]) -> list[Row]:
    """Train in one process to the end of the schedule."""
    return _alone(changes | {"name": "whole", "stop_after": None, "checkpoint_every": 50})


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_a_full_run_ends_with_the_same_loss(way: str, whole: list[Row], changes: dict[str, Any]) -> None:
    rows = _spread(WAYS[way], 2, changes | {"name": f"whole-{way}", "stop_after": None, "checkpoint_every": 50})
    assert len(rows) == len(whole) > 4 * STEPS
    assert rows[-1]["eval_loss"] == pytest.approx(whole[-1]["eval_loss"], rel=0.01)


@pytest.mark.parametrize(
    "way",
    [
        "fsdp",
        pytest.param("zero3", marks=pytest.mark.nightly),
        pytest.param("ddp", marks=pytest.mark.nightly),
        pytest.param("zero2-offload", marks=pytest.mark.nightly),
    ],
)
def test_a_run_resumes_with_another_number_of_ranks(way: str, alone: list[Row], changes: dict[str, Any]) -> None:
    for workers, stop in ((2, 10), (1, 20), (2, STEPS)):
        rows = _spread(WAYS[way], workers, changes | {"name": f"elastic-{way}", "stop_after": stop})
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    _assert_close(rows, alone, ELASTIC)


@pytest.mark.parametrize("way", ["fsdp", pytest.param("zero3", marks=pytest.mark.nightly)])
def test_two_machines_agree_with_one_process(way: str, alone: list[Row], changes: dict[str, Any]) -> None:
    name = f"machines-{way}"
    rows = _spread(WAYS[way], 4, changes | BY_MACHINE[way] | {"name": name, "micro_batch_rows": 2}, machines=2)
    _assert_same_result(rows, name, alone, changes)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["fsdp", "zero3"])
def test_a_run_resumes_with_another_sharding(way: str, alone: list[Row], changes: dict[str, Any]) -> None:
    for workers, by_machine, stop in ((4, True, 4), (2, False, 8), (4, False, 12), (4, True, 16)):
        own = changes | (BY_MACHINE[way] if by_machine else {}) | {"name": f"layouts-{way}", "stop_after": stop}
        rows = _spread(WAYS[way], workers, own | {"micro_batch_rows": 2}, machines=workers // 2)
    assert [row["step"] for row in rows] == list(range(1, 17))
    _assert_close(rows, alone[:16], ELASTIC)


@pytest.mark.parametrize("way", ["zero3", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("ddp", "fsdp"))])
def test_three_ranks_share_four_micro_batches(way: str, alone: list[Row], changes: dict[str, Any]) -> None:
    rows = _spread(WAYS[way], 3, changes | {"name": f"three-{way}", "micro_batch_rows": 4, "stop_after": 10})
    _assert_close(rows, alone[:10], EXACT)


@pytest.fixture(scope="module")
def lora(changes: dict[str, Any]) -> dict[str, Any]:
    return changes | {"lora_rank": 4, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def lora_alone(lora: dict[str, Any]) -> list[Row]:
    return _alone(lora | {"name": "lora-alone"})


@pytest.mark.parametrize(
    ("way", "machines"),
    [
        ("zero3", 1),
        pytest.param("fsdp", 1, marks=pytest.mark.nightly),
        pytest.param("fsdp", 2, marks=pytest.mark.nightly),
        pytest.param("zero3", 2, marks=pytest.mark.nightly),
    ],
)
def test_lora_agrees_with_one_process(way: str, machines: int, lora_alone: list[Row], lora: dict[str, Any]) -> None:
    name = f"lora-{way}-{machines}"
    rows = _spread(WAYS[way], 2 * machines, lora | BY_MACHINE[way] | {"name": name}, machines)
    assert rows[-1]["loss"] < rows[0]["loss"]
    _assert_close(rows, lora_alone, EXACT)
    assert Path(lora["output"], name, "adapter/adapter_model.safetensors").exists()
    for weights, others in zip(_weights(lora, name), _weights(lora, "lora-alone"), strict=True):
        torch.testing.assert_close(weights, others, atol=1e-3, rtol=0)


def test_qlora_on_shards_has_the_losses_of_one_process(lora: dict[str, Any], assets: Path, tmp_path: Path) -> None:
    """With matrices of whole blocks of 64 numbers."""
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 2}
    model = str(packed_rows.write_model(tmp_path / "model", assets, **shape))
    own = lora | {"model": model, "quantize_base": True, "stop_after": 10, "checkpoint_every": 5}
    single = _alone(own | {"name": "qlora-alone"})
    for stop in (5, 10):  # the second run resumes
        rows = _spread(_fsdp, 2, own | {"name": "qlora-fsdp", "stop_after": stop})
    assert rows[-1]["loss"] < rows[0]["loss"]
    _assert_close(rows, single, EXACT)
    for weights, others in zip(_weights(lora, "qlora-fsdp"), _weights(lora, "qlora-alone"), strict=True):
        torch.testing.assert_close(weights, others, atol=1e-3, rtol=0)


@pytest.mark.parametrize("way", ["fsdp", pytest.param("ddp", marks=pytest.mark.nightly)])
def test_muon_agrees_with_one_process(way: str, changes: dict[str, Any]) -> None:
    own = changes | {"optimizer": "muon"}
    single = _alone(own | {"name": f"muon-alone-{way}"})
    for stop in (10, STEPS):  # the second run resumes
        rows = _spread(WAYS[way], 2, own | {"name": f"muon-{way}", "stop_after": stop})
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
    _assert_close(rows, single, MUON)


@pytest.mark.nightly  # installs torchao
def test_adamw_8bit_on_shards_resumes_bit_for_bit(
    changes: dict[str, Any], assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shards of whole blocks of 256 numbers, some of which have 4,096, the smallest that torchao quantizes."""
    packages = tmp_path / "packages"
    subprocess.run(
        [environment.find_uv(), "pip", "install", "--quiet", "--no-deps", "--target", packages, "torchao"], check=True
    )
    monkeypatch.syspath_prepend(str(packages))
    shape = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 2}
    model = str(packed_rows.write_model(tmp_path / "model", assets, **shape))
    own = changes | {"model": model, "optimizer": "adamw_8bit", "checkpoint_every": 5}
    plain = _spread(_fsdp, 2, changes | {"model": model, "name": "adamw-fsdp", "stop_after": 10})
    whole = _spread(_fsdp, 2, own | {"name": "8bit-whole", "stop_after": 10})
    for stop in (5, 10):
        rows = _spread(_fsdp, 2, own | {"name": "8bit-parts", "stop_after": stop})
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]
    for weights, others in zip(_weights(own, "8bit-parts"), _weights(own, "8bit-whole"), strict=True):
        assert torch.equal(weights, others)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
    _assert_close(rows, plain, EIGHT_BITS)
    assert rows[-1]["loss"] != plain[-1]["loss"]
    moved = _spread(_fsdp, 1, own | {"name": "8bit-parts", "stop_after": 12})  # other shards
    assert moved[-1]["loss"] < rows[0]["loss"] - 0.2


@pytest.mark.parametrize(
    "way", ["fsdp", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("ddp", "zero2-offload"))]
)
def test_bf16_is_close_to_fp32(way: str, alone: list[Row], changes: dict[str, Any]) -> None:
    rows = _spread(WAYS[way], 2, changes | {"name": f"bf16-{way}", "precision": "bf16"})
    _assert_close(rows, alone, BF16)
    apart = max(abs(row["loss"] - other["loss"]) for row, other in zip(rows, alone, strict=True))
    assert apart > EXACT  # otherwise the run did not compute in bf16


def _alone(changes: dict[str, Any], make_strategy: MakeStrategy = DDP) -> list[Row]:
    options, _ = _ddp(changes)
    folder = Path(options.output, options.name)
    train(options, SingleProcess(folder, torch.device("cpu"), options.keep_checkpoints), make_strategy)
    return _rows(folder)


def _spread(way: Way, workers: int, changes: dict[str, Any], machines: int = 1) -> list[Row]:
    options, make_strategy = way(changes)
    folder = Path(options.output, options.name)
    folder.mkdir(exist_ok=True)
    meeting = folder / f"meeting-{options.stop_after}"
    ranks.run(_rank, (workers, machines, meeting, options, make_strategy), workers)
    return _rows(folder)


def _rank(
    number: int, workers: int, machines: int, meeting: Path, options: TrainOptions, make_strategy: MakeStrategy
) -> None:
    local = workers // machines
    os.environ |= {"LOCAL_RANK": str(number % local), "LOCAL_WORLD_SIZE": str(local)}
    if options.precision == "bf16":
        # pretend that the CPU supports bf16; without support, torch emulates bf16 slowly but correctly
        pytest.MonkeyPatch().setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=workers)
    runtime = TorchrunRuntime(Path(options.output, options.name), torch.device("cpu"), options.keep_checkpoints)
    train(options, runtime, make_strategy)
    dist.destroy_process_group()


def _rows(folder: Path) -> list[Row]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"]]


def _assert_close(rows: list[Row], others: list[Row], tolerance: float) -> None:
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in others], abs=tolerance)


def _assert_same_result(rows: list[Row], name: str, alone: list[Row], changes: dict[str, Any]) -> None:
    """Compare a run with the one of a single process: the losses, the last evaluation and the exported weights."""
    _assert_close(rows, alone, EXACT)
    assert rows[-1]["eval_loss"] == pytest.approx(alone[-1]["eval_loss"], abs=EXACT)
    for weights, others in zip(_weights(changes, name), _weights(changes, "alone"), strict=True):
        torch.testing.assert_close(weights, others, atol=1e-3, rtol=0)


def _weights(changes: dict[str, Any], name: str) -> list[torch.Tensor]:
    return list(AutoModelForCausalLM.from_pretrained(f"{changes['output']}/{name}/model").parameters())
