"""Test that a loss computed in chunks, and its gradients, are those of the model's own loss."""

import json
from pathlib import Path
from typing import Any

import architectures
import pytest
import ranks
import torch
from torch.nn import LinearCrossEntropyOptions
from transformers import PreTrainedModel

from raymill import settings
from raymill.data.tokenization import NOT_TRAINED
from raymill.model_config import text_config
from raymill.training import chunked_loss, model_io, token_losses
from raymill.training.ddp import DDP
from raymill.training.deepspeed_zero import ZeRO
from raymill.training.fsdp import FSDP
from raymill.training.options import DDPOptions, DeepSpeedOptions, FSDPOptions
from raymill.training.packed_attention import TESTED_FAMILIES
from raymill.training.schedule import BatchPlan

ROWS, LENGTH, RANKS = 2, 20, 2
SEVERAL_CHUNKS = LinearCrossEntropyOptions(batch_chunk_size=16)  # ROWS * LENGTH tokens need three chunks
STRATEGIES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "DDP": (DDP, DDPOptions, ("train",)),
    "FSDP": (FSDP, FSDPOptions, ("train", "fsdp")),
    "ZeRO-3": (ZeRO, DeepSpeedOptions, ("train", "deepspeed")),
}


@pytest.mark.parametrize("family", [*architectures.FAMILIES, *architectures.COMPOSITES])
def test_the_loss_and_its_gradients_are_the_models_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "CHUNK", SEVERAL_CHUNKS)
    model = architectures.build(family)
    loss, gradients = _differentiate(model)
    tested = text_config(model.config).model_type in TESTED_FAMILIES
    assert chunked_loss.has_chunks(model) == tested
    if not tested:
        return  # it keeps its own loss
    chunked_loss.use_chunks(model)
    chunked, chunked_gradients = _differentiate(model)
    assert chunked == pytest.approx(loss, rel=1e-6)
    for expected, found in zip(gradients, chunked_gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [*architectures.FAMILIES, *architectures.COMPOSITES])
def test_the_losses_of_tokens_have_the_models_own_sum_and_gradients(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for families that cap or scale their logits, which keep their own output layer."""
    monkeypatch.setattr(token_losses, "CHUNK_TOKENS", 16)
    model = architectures.build(family)
    loss, gradients = _differentiate(model)
    token_losses.use_token_losses(model)
    found, found_gradients = _differentiate(model, of_tokens=True)
    assert found == pytest.approx(loss, rel=1e-5)
    for expected, gradient in zip(gradients, found_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("Gemma3Text", {"final_logit_softcapping": 30.0}),
        ("Qwen3Moe", {"output_router_logits": True}),
        ("Granite", {"logits_scaling": 8.0}),
    ],
)
def test_models_that_change_their_logits_or_loss_compute_it_themselves(family: str, change: dict[str, Any]) -> None:
    assert not chunked_loss.has_chunks(architectures.build(family, **change))


def test_in_bf16_the_loss_is_summed_in_fp32() -> None:
    """A sum in bf16 would be wrong by up to 0.4 %."""
    model = architectures.build("Qwen3").bfloat16()
    losses = [_differentiate(model, seed)[0] for seed in range(5)]
    chunked_loss.use_chunks(model)
    assert [_differentiate(model, seed)[0] for seed in range(5)] == pytest.approx(losses, rel=5e-4)


@pytest.fixture(scope="module")
def norms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return the norm of the gradients with each strategy, with and without chunks, with and without LoRA."""
    folder = tmp_path_factory.mktemp("norms")
    architectures.build("Qwen3", tie_word_embeddings=False).save_pretrained(folder / "model")
    ranks.run(_observe, (folder,), RANKS)
    return json.loads((folder / "norms.json").read_text())


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_every_strategy_gets_the_same_gradients(norms: dict[str, float], name: str, lora_rank: int) -> None:
    assert norms[f"{name}, LoRA {lora_rank}, chunks True"] == pytest.approx(
        norms[f"DDP, LoRA {lora_rank}, chunks False"], rel=1e-5
    )


def _observe(rank: int, folder: Path) -> None:
    ranks.join(rank, RANKS, folder)
    chunked_loss.CHUNK = SEVERAL_CHUNKS
    norms = {
        f"{name}, LoRA {lora_rank}, chunks {chunks}": _norm(
            rank, folder, name, lora_rank=lora_rank, chunked_loss=chunks
        )
        for name in STRATEGIES
        for lora_rank in (0, 4)
        for chunks in (False, True)
    }
    if rank == 0:
        (folder / "norms.json").write_text(json.dumps(norms))
    ranks.leave()


def _norm(rank: int, folder: Path, name: str, **changes: Any) -> float:
    kind, options_type, sections = STRATEGIES[name]
    changes |= {"model": str(folder / "model"), "gradient_checkpointing": True, "zero_stage": 3}
    options = settings.load(options_type, *sections, profile="local").model_copy(update=changes)
    runtime, plan = ranks.Rank(rank, RANKS), BatchPlan(1, 1)
    torch.manual_seed(0)
    with kind.loading(options, runtime, plan):
        model = model_io.load_model(options)
    strategy = kind(model, options, runtime, plan)
    strategy.accumulate(_batch(rank), torch.tensor(0.1), last=True)
    return float(strategy.step(1e-3))


def _differentiate(
    model: PreTrainedModel, seed: int = 0, *, of_tokens: bool = False
) -> tuple[float, list[torch.Tensor]]:
    """Return the summed loss of a batch, and the gradients of the parameters that have one."""
    model.zero_grad()
    loss = model(**_batch(seed), **({} if of_tokens else {"num_items_in_batch": 1}), use_cache=False).loss.sum()
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _batch(seed: int) -> dict[str, torch.Tensor]:
    """Return rows in which some labels are not trained."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 128, (ROWS, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    return {"input_ids": ids, "labels": ids.where(ids > 20, NOT_TRAINED), "position_ids": positions}
