"""Test with many model architectures that the documents of a packed row do not influence each other.

The tests use the attention that training chooses. A GPU's FlashAttention has no kernel for CPUs: here, a slow
computation of the same values replaces it.
"""

from itertools import pairwise
from typing import Any

import architectures
import pytest
import ranks
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from raymill import settings
from raymill.data.tokenization import NOT_TRAINED
from raymill.model_config import text_config
from raymill.training import packed_attention
from raymill.training.dataset import COLUMNS, Batch, as_batch
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions
from raymill.training.schedule import BatchPlan

FIRST, SECOND = 10, 14  # tokens of the two documents
# the linear attention of Qwen 3.5 carries a state from document to document
FAMILIES = [*architectures.FAMILIES, *(name for name in architectures.COMPOSITES if not name.startswith("Qwen3_5"))]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_does_not_see_the_one_before_it(family: str, rows: int) -> None:
    _expect_isolation(_strategy(architectures.build(family)), rows)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_flash_attention_keeps_documents_apart(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = architectures.build(family)
    batch = _batch(rows, torch.arange(1, 1 + FIRST))
    batch["position_ids"][0] = torch.arange(FIRST + SECOND)  # the rows have different numbers of documents
    batch = _with_starts(batch)
    expected = model(**packed_attention.model_inputs(model, batch)).logits
    tested = text_config(model.config).model_type in packed_attention.TESTED_FAMILIES
    assert packed_attention.has_varlen(model) == tested
    if not tested:
        return  # it keeps its own attention, which the test above covers
    packed_attention.use_varlen(model)
    monkeypatch.setattr(packed_attention, "varlen_attn", _slow_varlen_attn)
    torch.testing.assert_close(model(**packed_attention.model_inputs(model, batch)).logits, expected)
    _expect_isolation(_strategy(model), rows)


@pytest.mark.parametrize("change", [{"attention_dropout": 0.1}, {"head_dim": 264}])
def test_flash_attention_is_not_used_for_what_it_lacks(change: dict[str, Any]) -> None:
    assert not packed_attention.has_varlen(architectures.build("Qwen3", **change))


def _expect_isolation(strategy: DDP, rows: int) -> None:
    """Check that the loss of the second document does not depend on the first one."""
    generator = torch.Generator().manual_seed(0)
    losses = [strategy.summed_loss(_batch(rows, torch.randint(1, 128, (FIRST,), generator=generator))) for _ in "ab"]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)


def _strategy(model: PreTrainedModel) -> DDP:
    options = settings.load(DDPOptions, "train", profile="local")
    return DDP(model, options, ranks.Alone(), BatchPlan(2, 1))  # type: ignore[arg-type]


def _batch(rows: int, first: torch.Tensor) -> Batch:
    """Return packed rows of two documents. Only the second one is trained."""
    second = torch.arange(1, 1 + SECOND)
    labels = torch.cat([torch.full((FIRST + 1,), NOT_TRAINED), second[1:]])  # a document's first token has no context
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])
    row = {"input_ids": torch.cat([first, second]), "labels": labels, "position_ids": positions}
    return _with_starts({name: values.repeat(rows, 1) for name, values in row.items()})


def _with_starts(batch: Batch) -> Batch:
    return as_batch({name: batch[name].numpy() for name in COLUMNS})


def _slow_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seq_q: torch.Tensor,
    window_size: tuple[int, int],
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> torch.Tensor:
    """Compute what `varlen_attn` does, one document after the other."""
    ends = cu_seq_q.tolist()
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == (0, len(query))
    assert window_size[1] == 0, "the attention must be causal"
    outputs = []
    for start, end in pairwise(ends):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        mask = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        states = [part[start:end].transpose(0, 1)[None] for part in (query, key, value)]
        outputs.append(
            functional.scaled_dot_product_attention(*states, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)
