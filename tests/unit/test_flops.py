"""Compare the FLOPs per token with those that torch counts in a real forward and backward pass."""

from typing import Any

import architectures
import pytest
import torch
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES

from raymill.training import flops

ROWS, LENGTH = 2, 64
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}


def _model(config: PreTrainedConfig) -> PreTrainedModel:
    # with eager code, the counter sees every matrix product, and an expert processes only its own tokens
    config._attn_implementation = config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config)


def _counted(model: PreTrainedModel, tokens: torch.Tensor | None = None) -> float:
    """Return the FLOPs per token that torch counts in one forward and backward pass."""
    tokens = torch.randint(0, SIZES["vocab_size"], (ROWS, LENGTH)) if tokens is None else tokens
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    return counter.get_total_flops() / (ROWS * LENGTH)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LlamaConfig(**SIZES), id="separate embeddings"),
        pytest.param(LlamaConfig(**SIZES, tie_word_embeddings=True), id="tied embeddings"),
        pytest.param(Qwen3Config(**SIZES, head_dim=32), id="heads wider than the hidden size"),
        pytest.param(Gemma3TextConfig(**SIZES, head_dim=32), id="some layers attend to a window"),
        pytest.param(Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, num_experts=8), id="experts"),
        pytest.param(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2), id="Mixtral's experts"),
        pytest.param(GptOssConfig(**SIZES, head_dim=32, num_local_experts=8, num_experts_per_tok=2), id="gpt-oss"),
        pytest.param(
            DeepseekV3Config(
                **{**SIZES, **EXPERTS, **LATENT, "num_key_value_heads": 4},
                n_routed_experts=8,
                n_group=2,
                topk_group=1,
                first_k_dense_replace=1,
            ),
            id="latent attention, a shared expert",
        ),
    ],
)
def test_flops_equal_those_that_torch_counts(config: PreTrainedConfig) -> None:
    model = _model(config)
    formula = flops.flops_per_token(flops.compute_of(model), LENGTH)
    assert formula == pytest.approx(_counted(model), rel=0.012)


def test_flops_of_a_vision_tower_and_of_further_embeddings_do_not_count() -> None:
    """Gemma 4 looks up another embedding in each layer, and its layers have heads of different sizes."""
    model = architectures.build("Gemma4", head_dim=16, global_head_dim=32)
    model.set_attn_implementation("eager")
    formula = flops.flops_per_token(flops.compute_of(model), LENGTH)
    tokens = torch.randint(1, architectures.SIZES["vocab_size"], (ROWS, LENGTH))
    assert formula == pytest.approx(_counted(model, tokens), rel=0.03)


def test_flops_with_adapters_equal_those_that_torch_counts() -> None:
    model = _model(LlamaConfig(**SIZES))
    model.add_adapter(LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    formula = flops.flops_per_token(flops.compute_of(model), LENGTH)
    assert formula == pytest.approx(_counted(model), rel=0.02)


def test_flops_are_counted_on_the_meta_device() -> None:
    """`inv plan` counts the FLOPs of a model on the meta device, and must get the same result as a run."""
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, num_experts=8)
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(config)
    assert flops.compute_of(planned) == flops.compute_of(_model(config))


def test_linear_attention_has_no_matrix_of_scores() -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 8}
    config = Qwen3NextConfig(**SIZES, **EXPERTS, **sizes, head_dim=16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert config.layer_types.count("full_attention") == 1
    assert flops.compute_of(model).attention == SIZES["num_attention_heads"] * 16


def test_every_layer_type_of_transformers_is_known() -> None:
    """A new type must be added to `is_attention` or `carries_state`, or here, if it does neither."""
    attention = set(filter(flops.is_attention, ALLOWED_ATTN_LAYER_TYPES))
    stateful = set(filter(flops.carries_state, ALLOWED_ATTN_LAYER_TYPES))
    assert set(ALLOWED_ATTN_LAYER_TYPES) - attention - stateful == {"moe"}
    assert attention & stateful == {"hybrid", "hybrid_sliding"}


def test_the_peak_is_found_by_device_name() -> None:
    assert flops.peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert flops.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert flops.peak_flops("Tesla T4") is None
