"""Test with many model architectures that the documents of a packed row do not influence each other.

The test uses the attention that training chooses.
"""

from typing import Any

import pytest
import ranks
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

import settings
from pipeline.data.tokenization import NOT_TRAINED
from pipeline.training.dataset import Batch
from pipeline.training.options import DDPOptions
from pipeline.training.schedule import BatchPlan
from pipeline.training.strategies import DDP

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
WINDOW = {"head_dim": 8, "sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Mixtral": {"num_local_experts": 4},
    "Ministral3": {"head_dim": 8},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": EXPERTS | {"num_experts": 4, "head_dim": 8},
    "Gemma2": WINDOW,
    "Gemma3Text": WINDOW,
    "Gemma4Text": {"head_dim": 8},
    "GptOss": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {},
    "DeepseekV3": EXPERTS | LATENT | GROUPS,
    "Glm4": {"head_dim": 8},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 8},
    "Granite": {},
    "GraniteMoeHybrid": {"shared_intermediate_size": 32, "mamba_n_heads": 4, "layer_types": ["attention"] * 4},
    "SmolLM3": {},
}
FIRST, SECOND = 10, 14  # tokens of the two documents


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_does_not_see_the_one_before_it(family: str, rows: int) -> None:
    strategy = _strategy(getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]}))
    generator = torch.Generator().manual_seed(0)
    losses = [strategy.summed_loss(_batch(rows, torch.randint(1, 128, (FIRST,), generator=generator))) for _ in "ab"]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)


def _strategy(config: PreTrainedConfig) -> DDP:
    torch.manual_seed(0)
    options = settings.load(DDPOptions, "train", profile="local")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=None).eval()
    return DDP(model, options, ranks.Alone(), BatchPlan(2, 1))  # type: ignore[arg-type]


def _batch(rows: int, first: torch.Tensor) -> Batch:
    """Return packed rows of two documents. Only the second one is trained."""
    second = torch.arange(1, 1 + SECOND)
    labels = torch.cat([torch.full((FIRST + 1,), NOT_TRAINED), second[1:]])  # a document's first token has no context
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])
    row = {"input_ids": torch.cat([first, second]), "labels": labels, "position_ids": positions}
    return {name: values.repeat(rows, 1) for name, values in row.items()}
