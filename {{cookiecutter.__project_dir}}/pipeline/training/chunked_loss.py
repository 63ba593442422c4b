"""Computes the loss in chunks of tokens, so that the logits of all tokens never exist at the same time."""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import LinearCrossEntropyOptions, functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from pipeline.data.tokenization import NOT_TRAINED

CHUNK = LinearCrossEntropyOptions(batch_chunk_size=1024)
"""Tokens per chunk. For each chunk, the GPU reads the weights of the output layer. torch would choose 64 tokens for a
hidden size of 4,096 and a vocabulary of 150,000, and so read them 16 times as often to save 2 GiB."""

TESTED_FAMILIES = (
    "gemma3_text",
    "glm4",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Model types for which a test compares this loss with the model's own. Other families may scale or cap the logits."""


def use_chunks(model: PreTrainedModel) -> None:
    """Make a model return only the loss, computed in chunks. `has_chunks` must be true for the model."""
    output = model.get_output_embeddings()
    output.forward = partial(_summed_loss, output)
    model.forward = MethodType(_forward, model)


def has_chunks(model: PreTrainedModel) -> bool:
    """Return whether a model's loss is the cross-entropy of a plain output layer, which can be computed in chunks."""
    config = model.config.get_text_config()
    adds_to_loss = getattr(config, "output_router_logits", False)
    caps_logits = getattr(config, "final_logit_softcapping", None)
    return config.model_type in TESTED_FAMILIES and not adds_to_loss and not caps_logits


def uses_chunks(model: PreTrainedModel) -> bool:
    return "forward" in vars(model.get_output_embeddings())


def _forward(model: PreTrainedModel, labels: torch.Tensor, num_items_in_batch: int, **inputs: Any) -> CausalLMOutput:
    """Return the loss of `labels`, of shape (rows, length). Label i is predicted from the tokens before it."""
    states = model.base_model(**inputs).last_hidden_state
    following = functional.pad(labels[:, 1:], (0, 1), value=NOT_TRAINED)
    return CausalLMOutput(loss=model.get_output_embeddings()(states, following) / num_items_in_batch)


def _summed_loss(output: nn.Linear, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of `labels`, of shape (rows, length), given the final hidden states.

    This is the output layer's `forward`, because FSDP and ZeRO-3 gather the weights only while the layer is called.
    """
    weight, bias = output.weight, output.bias
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
        states, weight = states.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return functional.linear_cross_entropy(
        states.flatten(0, 1),
        weight,
        labels.flatten(),
        linear_bias=bias,
        reduction="sum",
        ignore_index=NOT_TRAINED,
        options=CHUNK,
    )
