"""Counts the floating-point operations of training per token, and looks up the peak performance of a GPU."""

import re
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

import instance_types
from pipeline.training.parameters import numel

EXPERT = re.compile(r"\.experts\.")
TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")  # names in transformers' configs


@dataclass(frozen=True)
class Compute:
    """The sizes of a model that determine the number of operations per token."""

    active: int
    """Parameters that are used for each token: all except an untied input embedding, which is only looked up, and the
    experts that are not chosen."""
    frozen: int
    """Active parameters that are not trained."""
    attention: int
    """Attention layers x heads x head dimension. If queries and values differ in size, the mean of both."""


def compute_of(model: PreTrainedModel) -> Compute:
    """Return the sizes of a model, which may be on torch's meta device.

    In a mixture of experts, only the chosen experts count. Layers with linear attention or convolutions are not
    attention layers here, because they have no matrix of attention scores.
    """
    text = model.config.get_text_config()
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    active = frozen = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and embedding is not output:
            continue
        count = numel(parameter) * (_chosen_share(text) if EXPERT.search(name) else 1)
        active += count
        frozen += 0 if parameter.requires_grad else count
    return Compute(round(active), round(frozen), _attention_layers(text) * _attention_width(text))


def is_attention(layer_type: str) -> bool:
    """Return whether layers of this type compare tokens. The types are those of transformers' `layer_types`."""
    others = ("hybrid", "hybrid_sliding", "minimax_m3_sparse")
    return layer_type in others or (layer_type.endswith("attention") and not carries_state(layer_type))


def carries_state(layer_type: str) -> bool:
    """Return whether layers of this type carry a state from token to token, and so across packed documents."""
    return layer_type in ("linear_attention", "conv", "hybrid", "hybrid_sliding")


def flops_per_token(compute: Compute, sequence_length: int) -> float:
    """Return the floating-point operations per token of one forward and backward pass.

    The formula is 6 N + 12 L H Q T (PaLM, Chowdhery et al. 2022, arXiv:2204.02311, appendix B), with N = `active`,
    L H Q = `attention` and T = `sequence_length`. Recomputed activations do not count. The formula ignores
    that packed documents attend only to themselves, and that some layers attend only to a window. A frozen parameter
    has no gradient, which saves 2 of its 6 operations.
    """
    return 6 * compute.active - 2 * compute.frozen + 12 * compute.attention * sequence_length


def chosen_experts(config: PreTrainedConfig) -> int:
    """Return how many experts process a token, or 0 if the model has no experts."""
    return next((getattr(config, name) for name in TOP_K if getattr(config, name, None)), 0)


def _chosen_share(config: PreTrainedConfig) -> float:
    """Return the share of the experts that process a token."""
    chosen = chosen_experts(config)
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    experts = next((getattr(config, name) for name in counts if getattr(config, name, None)), None)
    return chosen / experts if chosen and experts else 1


def _attention_layers(config: PreTrainedConfig) -> int:
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(map(is_attention, types))


def _attention_width(config: PreTrainedConfig) -> int:
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # DeepSeek's latent attention
        return heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


# Dense bf16 operations per second of GPUs that no instance type has, from NVIDIA's data sheets.
OTHER_PEAKS = {"NVIDIA A100-PCIE-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA H100 PCIe": 756e12}


def peak_flops(device_name: str) -> float | None:
    """Return the device's peak number of dense bf16 operations per second, or None if it is unknown."""
    gpu = instance_types.gpu_of(device_name)
    return gpu.bf16_flops if gpu else OTHER_PEAKS.get(device_name)
