"""Test that FSDP and ZeRO-3 load a model in shards, with exactly the values of `from_pretrained` and little memory."""

import gc
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from raymill import settings
from raymill.training import model_io, parameters
from raymill.training.deepspeed_zero import ZeRO
from raymill.training.fsdp import FSDP
from raymill.training.options import DeepSpeedOptions, FSDPOptions
from raymill.training.schedule import BatchPlan

RANKS = 2
SIZES = {
    "vocab_size": 513,  # odd, so that the ranks have different numbers of rows
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "gemma2": Gemma2Config(**SIZES, head_dim=32),
    "mixture": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32),
}
LARGE = "large"
LARGE_CONFIG = LlamaConfig(**SIZES | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8})
WAYS = {
    "fsdp": (FSDP, FSDPOptions, "fsdp", {}),
    "zero3": (ZeRO, DeepSpeedOptions, "deepspeed", {"zero_stage": 3}),
}


@pytest.fixture(scope="module", params=["fsdp", pytest.param("zero3", marks=pytest.mark.nightly)])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank observed for each model."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in (FAMILIES | {LARGE: LARGE_CONFIG}).items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DS_ACCELERATOR", "cpu")
        environment.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # malloc then returns freed tensors to the system at once
        spawn(_observe, (folder, request.param), nprocs=RANKS)
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [report[name] for report in reports] for name in reports[0]}


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_parameters_have_the_values_of_from_pretrained(
    family: str, seen: dict[str, list[dict[str, Any]]]
) -> None:
    for rank in seen[family]:
        assert rank["different"] == []
        assert rank["tied"] == FAMILIES[family].tie_word_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sizes_of_parameters_are_those_before_sharding(family: str, seen: dict[str, list[dict[str, Any]]]) -> None:
    """ZeRO-3 leaves each parameter as an empty vector, which would count as 0 and get no weight decay."""
    for rank in seen[family]:
        assert rank["parameters"] == rank["whole"] // 4
        assert rank["decays"] == [True, False]  # matrices, then vectors


@pytest.mark.parametrize("family", [*FAMILIES, LARGE])
def test_a_rank_holds_only_its_share(family: str, seen: dict[str, list[dict[str, Any]]]) -> None:
    for rank in seen[family]:
        assert rank["held"] == pytest.approx(rank["whole"] / RANKS, rel=0.02)


@pytest.mark.nightly
def test_fsdp_keeps_no_full_tensors(tmp_path: Path) -> None:
    """If a file already has the requested dtype, transformers makes each shard a view of the full tensor."""
    AutoModelForCausalLM.from_config(FAMILIES["llama"], dtype=torch.float32).save_pretrained(tmp_path / "llama")
    spawn(_check_storages, (tmp_path,), nprocs=RANKS)


def test_loading_needs_little_more_memory_than_the_share(seen: dict[str, list[dict[str, Any]]]) -> None:
    for rank in seen[LARGE]:
        assert rank["peak"] < 0.7 * rank["whole"]


def _observe(rank: int, folder: Path, way: str) -> None:
    ranks.join(rank, RANKS, folder)
    report = {name: _load(folder / name, WAYS[way], rank) for name in (*FAMILIES, LARGE)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))
    ranks.leave()


def _check_storages(rank: int, folder: Path) -> None:
    ranks.join(rank, RANKS, folder)
    options = settings.load(FSDPOptions, "train", "fsdp", profile="local")
    options = options.model_copy(update={"model": str(folder / "llama")})
    runtime: Any = ranks.Rank(rank, RANKS)
    plan = BatchPlan(2, 2)
    with FSDP.loading(options, runtime, plan):
        model = model_io.load_model(options)
    for parameter in FSDP(model, options, runtime, plan).model.parameters():
        assert isinstance(parameter, DTensor)
        most_rows = -(-parameter.shape[0] // RANKS)
        assert parameter.to_local().untyped_storage().nbytes() <= most_rows * parameter.nbytes // parameter.shape[0]
    ranks.leave()


def _load(folder: Path, way: Any, rank: int) -> dict[str, Any]:
    """Load a model, and compare its memory, parameters and buffers with those of `from_pretrained`."""
    strategy_type, options_type, section, changes = way
    options = settings.load(options_type, "train", section, profile="local")
    options = options.model_copy(update=changes | {"model": str(folder)})
    runtime, plan = ranks.Rank(rank, RANKS), BatchPlan(2, 2)
    before = _tensor_bytes()
    with _anonymous_memory() as memory, strategy_type.loading(options, runtime, plan):
        model = model_io.load_model(options)
    held, counted = _tensor_bytes() - before, parameters.count(model)
    strategy = strategy_type(model, options, runtime, plan)
    gathered = dict(strategy.gather())
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    buffers = dict(model.named_buffers())
    different = [name for name, buffer in whole.named_buffers() if not torch.equal(buffer, buffers[name])]
    if rank == 0:
        different += [name for name, value in whole.named_parameters() if not torch.equal(value, gathered[name])]
    return {
        "different": different,
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "whole": sum(parameter.nbytes for parameter in whole.parameters()),
        "held": held,
        "parameters": counted,
        "decays": [group["weight_decay"] > 0 for group in strategy.optimizer.param_groups],
        "peak": memory.peak,
    }


def _tensor_bytes() -> int:
    """Return the size of all tensors in main memory, in bytes."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def _anonymous_memory() -> Iterator[SimpleNamespace]:
    """Measure the largest growth of this process's memory, in bytes. Memory-mapped files do not count."""
    before, memory, ended = _rss_anon(), SimpleNamespace(peak=0), threading.Event()

    def sample() -> None:
        while not ended.wait(0.0005):
            memory.peak = max(memory.peak, _rss_anon() - before)

    sampler = threading.Thread(target=sample)
    sampler.start()
    yield memory
    ended.set()
    sampler.join()


def _rss_anon() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024
