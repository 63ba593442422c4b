"""Test what crosses the network with `hybrid_shard` and `hpz`: four gloo ranks act as two machines, without Ray."""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from raymill import settings
from raymill.errors import UserError
from raymill.training import model_io
from raymill.training.deepspeed_zero import ZeRO
from raymill.training.fsdp import FSDP
from raymill.training.options import DeepSpeedOptions, FSDPOptions
from raymill.training.schedule import BatchPlan

pytestmark = pytest.mark.nightly
RANKS, MACHINES, PASSES = 4, 2, 3
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2
)  # ZeRO-3 shards only weights of more than 10,000 elements
WAYS: dict[str, Any] = {
    "fsdp": (FSDP, FSDPOptions, "fsdp", {"hybrid_shard": True}),
    "zero3": (ZeRO, DeepSpeedOptions, "deepspeed", {"zero_stage": 3, "hpz": True}),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what rank 0 observed with each strategy."""
    folder = tmp_path_factory.mktemp("machines")
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "model")
    ranks.run(_observe, (folder,), RANKS)
    return json.loads((folder / "seen.json").read_text())


def test_fsdp_gathers_parameters_only_within_a_machine(seen: dict[str, dict[str, Any]]) -> None:
    moved = seen["fsdp"]["moved"]
    assert moved["gathered within"] >= PASSES * seen["fsdp"]["parameters"]
    assert "gathered across" not in moved


def test_fsdp_sums_the_gradients_of_replicas_once_per_step(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["fsdp"]["moved"]["reduced across"] == seen["fsdp"]["parameters"] * MACHINES // RANKS


def test_fsdp_shards_over_the_ranks_of_a_machine(seen: dict[str, dict[str, Any]]) -> None:
    share = seen["fsdp"]["parameters"] * MACHINES // RANKS
    assert seen["fsdp"]["loaded"] == seen["fsdp"]["held"] == share


def test_replicas_share_the_writing_of_a_checkpoint(seen: dict[str, dict[str, Any]]) -> None:
    whole = 12 * seen["fsdp"]["parameters"]
    assert whole < seen["fsdp"]["checkpoint"] < 1.2 * whole


def test_zero_gathers_parameters_across_machines_once_per_step(seen: dict[str, dict[str, Any]]) -> None:
    moved = seen["zero3"]["moved"]
    assert moved["gathered across"] == seen["zero3"]["parameters"]
    assert moved["gathered within"] > 0.9 * (PASSES - 1) * seen["zero3"]["parameters"]


@pytest.mark.parametrize("way", WAYS)
def test_machines_with_different_numbers_of_ranks_are_refused(way: str, seen: dict[str, dict[str, Any]]) -> None:
    assert "different numbers of workers" in seen[way]["refused"]


def _observe(rank: int, folder: Path) -> None:
    ranks.join(rank, RANKS, folder)
    seen = {name: _train(way, rank, folder) for name, way in WAYS.items()}
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    ranks.leave()


def _train(way: Any, rank: int, folder: Path) -> dict[str, Any]:
    """Train two steps, and return what the second one moved between ranks."""
    kind, options_type, section, switch = way
    options = settings.load(options_type, "train", section, profile="local")
    options = options.model_copy(update=switch | {"micro_batch_rows": 1, "model": str(folder / "model")})
    plan, uneven = BatchPlan(PASSES, PASSES), ranks.Rank(rank, RANKS, 1 if rank == 0 else 3)
    with pytest.raises(UserError) as refused, kind.loading(options, uneven, plan):
        pass
    runtime = ranks.Rank(rank, RANKS, RANKS // MACHINES)
    with kind.loading(options, runtime, plan):
        model = model_io.load_model(options)
    seen = {"refused": str(refused.value), "parameters": LlamaForCausalLM(CONFIG).num_parameters()}
    seen["loaded"] = _local_elements(model)
    strategy = kind(model, options, runtime, plan)
    for step in range(2):
        with _Collectives() as collectives:
            for number in range(PASSES):
                strategy.accumulate(_batch(step, number, rank), torch.tensor(0.01), number == PASSES - 1)
            strategy.step(1e-3)
        seen["moved"] = collectives.elements
    if kind is FSDP:
        strategy.capture()(folder)
        distributed.barrier()
        seen["checkpoint"] = sum(file.stat().st_size for file in (folder / "fsdp").iterdir())
    return seen | {"held": _local_elements(model)}


def _local_elements(model: torch.nn.Module) -> int:
    """Return how many elements of FSDP's parameters this rank holds."""
    return sum(each.to_local().numel() for each in model.parameters() if isinstance(each, DTensor))


def _batch(step: int, number: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    row = torch.randint(CONFIG.vocab_size, (1, 16), generator=generator)
    return {"input_ids": row, "labels": row, "position_ids": torch.arange(16)[None]}


KINDS = {"_allgather_base_": "gathered", "allreduce_": "reduced"}


class _Collectives(TorchDispatchMode):
    """Counts the elements that collectives move within a machine and across machines."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("c10d::")
        if name in KINDS:
            objects = [each for each in args if isinstance(each, torch.ScriptObject)]
            group = distributed.ProcessGroup.unbox(objects[0])
            machines = {rank * MACHINES // RANKS for rank in distributed.get_process_group_ranks(group)}
            key = f"{KINDS[name]} {'across' if len(machines) > 1 else 'within'}"
            largest = max(each.numel() for each in tree_leaves(args) if isinstance(each, torch.Tensor))
            self.elements[key] = self.elements.get(key, 0) + largest
        return func(*args, **(kwargs or {}))
