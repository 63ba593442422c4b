"""Makes a model return the loss of each token, in fp32, and never hold the logits of all tokens as fp32."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from raymill.data.tokenization import NOT_TRAINED
from raymill.training.chunked_loss import has_chunks

CHUNK_TOKENS = 1024


def use_token_losses(model: PreTrainedModel) -> None:
    """Make a model return the cross-entropies of its labels, of shape (rows, length), as `loss`.

    The loss at a token is that of the next one. It is 0 where nothing is trained. Models that cap or scale their
    logits compute them as a whole, in the format of the computation.
    """
    if has_chunks(model):
        output = model.get_output_embeddings()
        output.forward = partial(_output_losses, output)
        model.forward = MethodType(_forward, model)
    else:
        model.forward = MethodType(partial(_forward_whole, whole=model.forward), model)


def _forward(model: PreTrainedModel, labels: torch.Tensor, **inputs: Any) -> CausalLMOutput:
    states = model.base_model(**inputs).last_hidden_state
    return CausalLMOutput(loss=model.get_output_embeddings()(states, _following(labels)))


def _forward_whole(
    model: PreTrainedModel, labels: torch.Tensor, *, whole: Callable[..., Any], **inputs: Any
) -> CausalLMOutput:
    logits = whole(**inputs).logits
    return CausalLMOutput(loss=_in_chunks(_of_logits, logits, _following(labels)))


def _following(labels: torch.Tensor) -> torch.Tensor:
    return functional.pad(labels[:, 1:], (0, 1), value=NOT_TRAINED)


def _output_losses(output: nn.Linear, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the losses, given the final hidden states.

    This is the output layer's `forward`, because FSDP and ZeRO-3 gather the weights only while the layer is called.
    torch's linear_cross_entropy would return losses in bf16.
    """
    return _in_chunks(partial(_of_states, weight=output.weight, bias=output.bias), states, labels)


def _in_chunks(losses: Callable[..., torch.Tensor], values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the losses of labels, of shape (rows, length). Each chunk is computed again in the backward pass."""
    chunks = zip(values.flatten(0, 1).split(CHUNK_TOKENS), labels.flatten().split(CHUNK_TOKENS), strict=True)
    found = [checkpoint(losses, some, of_them, use_reentrant=False) for some, of_them in chunks]
    return torch.cat(found).view_as(labels)  # type: ignore[arg-type]


def _of_states(
    states: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return _of_logits(functional.linear(states, weight, bias), labels)


def _of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), labels, ignore_index=NOT_TRAINED, reduction="none")
