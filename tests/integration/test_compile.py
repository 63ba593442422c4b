"""Test compiled decoder layers (`compile = true`) on packed rows: results, separate documents, number of compilations.

The backend `aot_eager` traces layers and gradients as torch's default backend does, but generates no code.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import architectures
import numpy as np
import pytest
import ranks
import torch
from torch import distributed
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from raymill import settings
from raymill.data.tokenization import NOT_TRAINED
from raymill.training.dataset import Batch, as_batch
from raymill.training.ddp import DDP
from raymill.training.deepspeed_zero import ZeRO
from raymill.training.fsdp import FSDP
from raymill.training.model_io import load_model
from raymill.training.options import DDPOptions, DeepSpeedOptions, FSDPOptions
from raymill.training.schedule import BatchPlan
from raymill.training.strategy import Strategy

torch.set_num_threads(1)  # with tensors this small, several threads would only wait for one another

GRAPHS = {
    "DeepseekV3": 2,  # dense layers, and layers of experts
    "Gemma4Text": 2,  # layers with a sliding window, and layers with full attention and larger heads
    "SmolLM3": 2,  # layers with and without rotary embeddings
}
"""How many different layers the models of a family have, if more than 1. Equal layers share one compilation."""

SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"lora_rank": 4},
    "all of these": {"precision": "bf16", "gradient_checkpointing": True, "lora_rank": 4},
}
STRATEGIES: dict[str, tuple[type[Strategy], Any, list[str], dict[str, Any]]] = {
    "ddp": (DDP, DDPOptions, [], {}),
    "fsdp": (FSDP, FSDPOptions, ["fsdp"], {}),
    "zero2": (ZeRO, DeepSpeedOptions, ["deepspeed"], {"zero_stage": 2}),
    "zero3": (ZeRO, DeepSpeedOptions, ["deepspeed"], {"zero_stage": 3}),
}
TRACED = ("ddp", "fsdp", "zero2")
"""Strategies whose hooks break no graph."""

RANKS = 2
LAST = 8  # tokens of the last document of a row
ROWS = [(10, 0), (10, 1), (5, 2), (20, 3)]
"""The length and the random seed of the first document in the rows of each batch."""
LENGTH = 32


class Seen(NamedTuple):
    """What the passes over the batches of ROWS returned."""

    losses: list[float]
    norms: list[float]
    """Norms of the gradients."""
    graphs: list[int]
    """Number of compiled graphs so far."""
    breaks: int
    """How often tracing of the layers stopped, because it met code that it cannot trace."""


@pytest.fixture(scope="module", params=architectures.FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Seen, Seen]:
    """Return a family's name, and what was seen without and with compiled layers."""
    folder = _write_model(request.param, tmp_path_factory.mktemp("model"))
    return request.param, _run(_ddp(folder)), _run_compiled(folder)


@pytest.fixture(scope="module")
def seen_by_strategy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, Seen]]:
    """Return what rank 0 saw without and with compiled layers, for each of TRACED."""
    return _run_on_ranks(tmp_path_factory.mktemp("strategies"), *TRACED)


# ------------------------------------------------------------------------------------------ families


def test_compiled_layers_compute_the_same(family: tuple[str, Seen, Seen]) -> None:
    _, eager, compiled = family
    _assert_same(compiled, eager)


def test_a_document_does_not_see_the_one_before_it(family: tuple[str, Seen, Seen]) -> None:
    """The first two batches differ only in documents without a loss."""
    _, _, compiled = family
    assert compiled.losses[0] == pytest.approx(compiled.losses[1], rel=1e-6)


def test_equal_layers_share_one_compilation_without_graph_breaks(family: tuple[str, Seen, Seen]) -> None:
    name, _, compiled = family
    assert (compiled.graphs[0], compiled.breaks) == (GRAPHS.get(name, 1), 0)


def test_documents_of_other_lengths_compile_nothing(family: tuple[str, Seen, Seen]) -> None:
    _, _, compiled = family
    assert compiled.graphs[-1] == compiled.graphs[0]


# ------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["Llama", pytest.param("Qwen3", marks=pytest.mark.nightly)])
def test_other_settings_compile_as_well(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = _write_model(name, tmp_path)
    eager, compiled = _run(_ddp(folder, **changes)), _run_compiled(folder, **changes)
    _assert_same(compiled, eager)
    assert (compiled.graphs, compiled.breaks) == ([1] * len(ROWS), 0)


def test_an_evaluation_compiles_each_layer_at_most_twice(tmp_path: Path) -> None:
    """Without gradients, the first layer's input differs from that of the others. Later evaluations compile nothing."""
    with _counted() as counter:
        strategy = _ddp(_write_model("Qwen3", tmp_path), compile=True, gradient_checkpointing=True)
        counts = []
        for _ in range(3):
            strategy.accumulate(_batch(10, 0), torch.tensor(1.0), last=True)
            strategy.module.eval()
            with torch.no_grad():
                strategy.summed_loss(_batch(10, 0))
            strategy.module.train()
            counts.append(counter.frame_count)
    assert counts[0] <= 3
    assert counts == counts[:1] * 3


@pytest.mark.nightly
def test_the_default_backend_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This backend, Inductor, generates C++ on a CPU. The compiler takes up to a minute."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    folder = _write_model("Qwen3", tmp_path / "model")
    eager = _run(_ddp(folder))
    torch._dynamo.reset()
    _assert_same(_run(_ddp(folder, compile=True)), eager)


# ------------------------------------------------------------------------------------------ strategies


@pytest.mark.parametrize("strategy", TRACED)
def test_hooks_of_strategies_break_no_graph(strategy: str, seen_by_strategy: dict[str, tuple[Seen, Seen]]) -> None:
    eager, compiled = seen_by_strategy[strategy]
    _assert_same(compiled, eager)
    assert (compiled.graphs, compiled.breaks) == ([1] * len(ROWS), 0)


@pytest.mark.nightly
def test_hooks_of_zero_stage_3_break_graphs(tmp_path: Path) -> None:
    """DeepSpeed gathers each module's parameters in hooks that cannot be traced.

    If there are no graph breaks, DeepSpeed has improved. Then update the docstring of `TrainOptions.compile`.
    """
    ((eager, compiled),) = _run_on_ranks(tmp_path, "zero3").values()
    _assert_same(compiled, eager)
    assert compiled.breaks > 0


# ------------------------------------------------------------------------------------------ helpers


def _write_model(family: str, folder: Path, **changes: Any) -> Path:
    """Write an untrained model, and return its folder."""
    architectures.build(family, **changes).save_pretrained(folder)
    return folder


def _ddp(folder: Path, **changes: Any) -> DDP:
    options = settings.load(DDPOptions, "train", profile="local").model_copy(update={"model": str(folder), **changes})
    torch.manual_seed(0)  # for the adapters
    return DDP(load_model(options), options, ranks.Alone(), BatchPlan(2, 1))  # type: ignore[arg-type]


@contextmanager
def _counted() -> Iterator[CompileCounterWithBackend]:
    """Let `compile` use the backend `aot_eager`, and count its graphs from 0."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=counter))
        yield counter


def _run_compiled(folder: Path, **changes: Any) -> Seen:
    with _counted() as counter:
        return _run(_ddp(folder, compile=True, **changes), counter)


def _run(strategy: Strategy, counter: CompileCounterWithBackend | None = None) -> Seen:
    """Train with the batches of ROWS and a learning rate of 0, which leaves the weights as they are."""
    seen = Seen([], [], [], 0)
    for first, seed in ROWS:
        seen.losses.append(strategy.accumulate(_batch(first, seed), torch.tensor(1.0), last=True).item())
        seen.norms.append(float(strategy.step(0)))
        seen.graphs.append(counter.frame_count if counter else 0)
    return seen._replace(breaks=sum(counters["graph_break"].values()))


def _batch(first: int, seed: int) -> Batch:
    """Return two rows of three documents with different boundaries. Only the last document is trained."""
    lengths = [(first, LENGTH - LAST - first, LAST), (LENGTH - LAST - first, first, LAST)]
    positions = np.array([np.concatenate([np.arange(length) for length in row]) for row in lengths], np.int32)
    tokens = np.random.default_rng(seed).integers(1, architectures.SIZES["vocab_size"], (2, LENGTH), np.int32)
    tokens[:, -LAST:] = np.arange(1, 1 + LAST)
    labels = np.full_like(tokens, NOT_TRAINED)
    labels[:, 1 - LAST :] = tokens[:, 1 - LAST :]  # a document's first token has no context
    return as_batch({"input_ids": tokens, "labels": labels, "position_ids": positions})


def _assert_same(compiled: Seen, eager: Seen) -> None:
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert compiled.norms == pytest.approx(eager.norms, rel=1e-4)


def _run_on_ranks(folder: Path, *strategies: str) -> dict[str, tuple[Seen, Seen]]:
    """Return what rank 0 of a gloo group saw without and with compiled layers, for each strategy."""
    _write_model("Qwen3", folder / "model", num_hidden_layers=2)
    ranks.run(_run_strategies, (folder, strategies), RANKS)
    seen = json.loads((folder / "seen.json").read_text())
    return {name: (Seen(*eager), Seen(*compiled)) for name, (eager, compiled) in seen.items()}


def _run_strategies(rank: int, folder: Path, strategies: tuple[str, ...]) -> None:
    ranks.join(rank, RANKS, folder)
    seen = {}
    for name in strategies:
        eager = _run(_distributed(name, rank, folder / "model"))
        with _counted() as counter:
            compiled = _run(_distributed(name, rank, folder / "model", compile=True), counter)
        seen[name] = eager, compiled
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    distributed.destroy_process_group()


def _distributed(name: str, rank: int, model: Path, **changes: Any) -> Strategy:
    make_strategy, options_type, sections, own = STRATEGIES[name]
    options = settings.load(options_type, "train", *sections, profile="local")
    options = options.model_copy(update={"model": str(model), "micro_batch_rows": 2, **own, **changes})
    runtime: Any = ranks.Rank(rank, RANKS)
    with make_strategy.loading(options, runtime, BatchPlan(2, 1)):
        loaded = load_model(options)
    return make_strategy(loaded, options, runtime, BatchPlan(2, 1))
