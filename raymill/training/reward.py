"""Reward models: a language model with a head that gives each answer a score, trained on pairs."""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from raymill.training.dataset import Batch
from raymill.training.objectives import Objective
from raymill.training.packed_attention import model_inputs
from raymill.training.pairs import existing_pairs, pair_up


class Reward(Objective):
    """The loss of Bradley and Terry 1952, with which chosen answers get larger scores (arXiv:2203.02155, eq. 1)."""

    task = "preference"
    output = "scores"
    best_metric, best_mode = "eval_rewards/accuracies", "max"
    metrics = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def counts(self, batch: Batch) -> torch.Tensor:
        return existing_pairs(batch).sum().repeat(self.size)

    def sums(self, module: nn.Module, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        chosen, rejected = pair_up(document_scores(module, model, batch)).unbind(-1)
        losses, up, down = -functional.logsigmoid(chosen - rejected), chosen.detach(), rejected.detach()
        found, exist = [losses, up, down, up - down, (up > down).float()], existing_pairs(batch)
        return torch.stack([torch.where(exist, values, 0.0).sum() for values in found])


def document_scores(module: nn.Module, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the score of each document, at its last token, of shape (rows, documents), in fp32.

    `use_scores` must have prepared the model. The scores of padding mean nothing.
    """
    inputs = {name: value for name, value in model_inputs(model, batch).items() if name != "labels"}
    return module(**inputs, ends=document_ends(batch), use_cache=False).logits


def document_ends(batch: Batch) -> torch.Tensor:
    """Return the place of the last token of each document, of shape (rows, documents)."""
    length = batch["input_ids"].shape[1]
    return functional.pad(batch["document_starts"][:, 1:].long(), (0, 1), value=length) - 1


def use_scores(model: PreTrainedModel, weight: torch.Tensor | None) -> None:
    """Make a sequence classifier return the scores of the tokens at `ends` as `logits`, in fp32, with a head in fp32.

    Args:
        weight: that of the head. None: zeros, which are the same in each strategy and on each rank.
    """
    with torch.device("cpu"):
        head = nn.Linear(model.config.hidden_size, 1, bias=False, dtype=torch.float32)
    with torch.no_grad():
        head.weight.zero_() if weight is None else head.weight.copy_(weight)
    head.forward = partial(_in_fp32, head)
    model.score = head
    model.forward = MethodType(_forward, model)


def _forward(model: PreTrainedModel, ends: torch.Tensor, **inputs: Any) -> SequenceClassifierOutputWithPast:
    states = model.base_model(**inputs).last_hidden_state
    last = states.gather(1, ends[:, :, None].expand(-1, -1, states.shape[2]))
    return SequenceClassifierOutputWithPast(logits=model.score(last).squeeze(-1))


def _in_fp32(head: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """This is the head's `forward`, because FSDP and ZeRO-3 gather the weights only while the layer is called."""
    with torch.autocast(states.device.type, enabled=False):
        return functional.linear(states.float(), head.weight.float())
