"""Counts the floating-point operations of training per token, and looks up the peak performance of a GPU."""

import re
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from raymill import instance_types
from raymill.model_config import layer_configs, text_config
from raymill.training.composite import output_layer, without_text
from raymill.training.parameters import numel

EXPERT = re.compile(r"\.experts\.")
TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")  # names in transformers' configs


@dataclass(frozen=True)
class Compute:
    """The sizes of a model that determine the number of operations per token."""

    active: int
    """Parameters that are used for each token: all except embeddings that are only looked up, the experts that are not
    chosen, and what text does not reach."""
    frozen: int
    """Active parameters that are not trained."""
    attention: int
    """Heads x head dimension, summed over attention layers. If queries and values differ in size, the mean of both."""


def compute_of(model: PreTrainedModel) -> Compute:
    """Return the sizes of a model, which may be on torch's meta device.

    In a mixture of experts, only the chosen experts count. Layers with linear attention or convolutions are not
    attention layers here, because they have no matrix of attention scores.
    """
    text = text_config(model.config)
    output, unreached = output_layer(model).weight, without_text(model)
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - {id(output)}
    active = frozen = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in looked_up or name in unreached:
            continue
        count = numel(parameter) * (_chosen_share(text) if EXPERT.search(name) else 1)
        active += count
        frozen += 0 if parameter.requires_grad else count
    return Compute(round(active), round(frozen), _attention_width(text))


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


def _attention_width(config: PreTrainedConfig) -> int:
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = zip(layer_configs(config), types, strict=True)
    return sum(_layer_width(layer) for layer, layer_type in layers if is_attention(layer_type))


def _layer_width(layer: PreTrainedConfig) -> int:
    if getattr(layer, "kv_lora_rank", None):  # DeepSeek's latent attention
        size = layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim
        return layer.num_attention_heads * size // 2
    return layer.num_attention_heads * head_size(layer)


def head_size(layer: PreTrainedConfig) -> int:
    """Return the number of elements of one head's query."""
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


# Dense bf16 operations per second of GPUs that no instance type has, from NVIDIA's data sheets.
OTHER_PEAKS = {"NVIDIA A100-PCIE-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA H100 PCIe": 756e12}


def peak_flops(device_name: str) -> float | None:
    """Return the device's peak number of dense bf16 operations per second, or None if it is unknown."""
    gpu = instance_types.gpu_of(device_name)
    return gpu.bf16_flops if gpu else OTHER_PEAKS.get(device_name)
