"""Kahneman-Tversky optimization: a loss of single answers, each with a label that says whether it is good."""

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from raymill.data.tokenization import NOT_TRAINED
from raymill.settings import inv
from raymill.training.dataset import Batch
from raymill.training.objectives import (
    Objective,
    document_logps,
    document_numbers,
    document_sums,
    document_tokens,
    is_trained,
)
from raymill.training.options import TrainOptions

LARGEST_SHARE_ALONE = 0.5
"""Largest share of packed rows with a single answer."""


class KTO(Objective):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8).

    Its baseline is how far the model has moved away from the base model: the mean log-ratio of mismatched answers in
    the global batch, or 0 if that is negative. No gradient flows through it.
    """

    task = "unpaired_preference"
    output = "token_losses"
    has_reference = has_baseline = True
    metrics = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    def views(self, batch: Batch) -> list[Batch]:
        return [batch, mismatched(batch)]

    def counts(self, batch: Batch) -> torch.Tensor:
        exist, good = document_tokens(batch) > 0, is_good(batch)
        answers, chosen, rejected = exist.sum(), (exist & good).sum(), (exist & ~good).sum()
        return torch.stack([answers, chosen, rejected, chosen, rejected, answers])

    def baseline_sums(self, module: nn.Module, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        others = mismatched(batch)
        exist = document_tokens(others) > 0
        ratios = document_logps(module, model, others) - batch["reference"][:, 1]
        return torch.stack([torch.where(exist, ratios, 0.0).sum(), exist.sum()])

    def sums(self, module: nn.Module, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        options, exist, good = self.options, document_tokens(batch) > 0, is_good(batch)
        logps = document_logps(module, model, batch)
        ratios, kl = logps - batch["reference"][:, 0], self.baseline.clamp(min=0)
        distance = options.beta * torch.where(good, ratios - kl, kl - ratios)
        weight = torch.where(good, options.desirable_weight, options.undesirable_weight)
        losses, rewards, logps = weight * (1 - distance.sigmoid()), options.beta * ratios.detach(), logps.detach()
        chosen, rejected = exist & good, exist & ~good
        found = [
            *((losses, exist), (rewards, chosen), (rewards, rejected)),
            *((logps, chosen), (logps, rejected), (kl, exist)),
        ]
        # not a product, in which 0 x infinity would be undefined
        return torch.stack([torch.where(these, values, 0.0).sum() for values, these in found])

    def named(self, means: list[float]) -> dict[str, float]:
        named = super().named(means)
        if "rewards/chosen" in named and "rewards/rejected" in named:
            named["rewards/margins"] = named["rewards/chosen"] - named["rewards/rejected"]
        return named

    def problem(self, reference: np.ndarray) -> str:
        alone = float((reference[:, 1] == 0).all(-1).mean())
        if alone <= LARGEST_SHARE_ALONE:
            return ""
        again = inv("submit preprocess -- --task unpaired_preference --overwrite --sequence-length 4096")
        return (
            f"{alone:.0%} of the rows of {self.options.data} hold a single answer, but kto compares each answer with "
            f"others of its row. Pack longer rows, for example: {again}"
        )


def is_good(batch: Batch) -> torch.Tensor:
    """Return which documents are good answers, of shape (rows, documents)."""
    starts = batch["document_starts"].long().clamp(max=batch["is_good"].shape[1] - 1)
    return batch["is_good"].gather(1, starts) > 0


def answer_tokens(batch: Batch) -> torch.Tensor:
    """Return which tokens belong to an answer: those from the first trained token of a document to its end."""
    so_far = is_trained(batch).cumsum(1)  # no document begins with a trained token
    at_start = so_far.gather(1, batch["document_starts"].long().clamp(max=so_far.shape[1] - 1))
    return so_far > at_start.gather(1, document_numbers(batch))


def mismatched(batch: Batch) -> Batch:
    """Return a batch in which each prompt has the answer of the next document of its row, and the last one the first.

    Rows keep their lengths. In rows with a single document, nothing is trained.
    """
    documents, positions, is_answer = document_numbers(batch), batch["position_ids"], answer_tokens(batch)
    answers = document_sums(is_answer.long(), batch)
    prompts = document_sums((~is_answer).long(), batch)
    count = (answers > 0).sum(1, keepdim=True)

    number = torch.arange(answers.shape[1], device=answers.device)[None]
    follows = torch.where(number < count, (number + 1) % count.clamp(min=1), number)
    before = torch.where(number < count, (number - 1) % count.clamp(min=1), number)
    lengths = prompts + answers.gather(1, follows)
    starts = lengths.cumsum(1) - lengths
    # an answer goes to the document before its own one
    to = torch.where(is_answer, before.gather(1, documents), documents)
    offset = torch.where(is_answer, prompts.gather(1, to) + positions - prompts.gather(1, documents), positions)
    target = starts.gather(1, to) + offset
    labels = batch["labels"].masked_fill(count < 2, NOT_TRAINED)
    moved = {"input_ids": batch["input_ids"], "labels": labels, "position_ids": offset}
    changed = {name: torch.empty_like(column).scatter_(1, target, column) for name, column in moved.items()}
    ends = torch.full_like(starts, positions.shape[1])
    return (
        batch | changed | {"document_starts": torch.where(lengths > 0, starts, ends).to(batch["document_starts"].dtype)}
    )
