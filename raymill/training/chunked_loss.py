"""Computes the loss in chunks of tokens, so that the logits of all tokens never exist at the same time."""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import LinearCrossEntropyOptions, functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from raymill.data.tokenization import NOT_TRAINED
from raymill.model_config import text_config
from raymill.training.packed_attention import TESTED_FAMILIES

CHUNK = LinearCrossEntropyOptions(batch_chunk_size=1024)
"""Tokens per chunk. For each chunk, the GPU reads the weights of the output layer. torch would choose 64 tokens for a
hidden size of 4,096 and a vocabulary of 150,000, and so read them 16 times as often to save 2 GiB."""


def use_chunks(model: PreTrainedModel) -> None:
    """Make a model return only the loss, computed in chunks. `has_chunks` must be true for the model."""
    output = model.get_output_embeddings()
    output.forward = partial(_summed_loss, output)
    model.forward = MethodType(_forward, model)


def has_chunks(model: PreTrainedModel) -> bool:
    """Return whether tests show that a model's loss is the cross-entropy of a plain output layer."""
    config = text_config(model.config)
    adds_to_loss = getattr(config, "output_router_logits", False)
    caps_logits = getattr(config, "final_logit_softcapping", None)
    scales_logits = getattr(config, "logits_scaling", 1) != 1
    return config.model_type in TESTED_FAMILIES and not (adds_to_loss or caps_logits or scales_logits)


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
    torch returns losses in the format of the computation, so the sum over tokens is taken here, in fp32.
    """
    weight, bias = output.weight, output.bias
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
        states, weight = states.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    losses = functional.linear_cross_entropy(
        states.flatten(0, 1),
        weight,
        labels.flatten(),
        linear_bias=bias,
        reduction="none",
        ignore_index=NOT_TRAINED,
        options=CHUNK,
    )
    return losses.float().sum()
