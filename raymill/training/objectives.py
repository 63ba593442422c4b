"""What training minimizes: the cross-entropy of answers, or a loss of pairs of a chosen and a rejected answer."""

import math
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from raymill.data.options import Task
from raymill.data.tokenization import NOT_TRAINED
from raymill.training.dataset import Batch, trained_tokens
from raymill.training.options import TrainOptions
from raymill.training.packed_attention import model_inputs
from raymill.training.ranking import Ranking


class Objective(ABC):
    """Sums over micro-batches, each with what it is divided by in the global batch.

    The first sums are terms of the loss, which is their sum after the division. The others are metrics.
    """

    task: Task = "supervised"
    """The rows that it needs."""
    terms: tuple[str, ...] = ("loss",)
    """Names of the terms. Several are also logged one by one."""
    metrics: tuple[str, ...] = ()
    has_token_losses = False
    """Whether the model returns the loss of each token, and has no dropout."""
    has_reference = False
    """Whether batches have `reference`: the log-probability of each document of `views` under the base model."""
    has_baseline = False
    """Whether `sums` needs a mean of `baseline_sums` over the global batch."""
    baseline: torch.Tensor
    has_perplexity = False
    """Whether exp(loss) is a perplexity."""
    bounds_loss = False
    """Whether a loss above twice that of a uniform guess means that training has diverged."""

    best_metric: str = "eval_loss"
    """The metric of an evaluation that says which model is better. It ranks checkpoints and the trials of `tune`."""
    best_mode: Literal["min", "max"] = "min"
    """Whether small or large values of it are good."""

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.best_metric, self.best_mode)

    @property
    def size(self) -> int:
        """Number of sums."""
        return len(self.terms) + len(self.metrics)

    def views(self, batch: Batch) -> list[Batch]:
        """Return the batches whose documents need a reference, such as the batch itself."""
        return [batch]

    def problem(self, reference: np.ndarray) -> str:
        """Return why the rows do not suit the objective, or an empty text. See `PackedRows.reference`."""
        return ""

    def baseline_sums(self, module: nn.Module, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the sum of the baseline over a micro-batch, and what it is divided by. There are no gradients."""
        raise NotImplementedError

    @abstractmethod
    def counts(self, batch: Batch) -> torch.Tensor:
        """Return what each sum is divided by, before it is added up over the global batch."""

    @abstractmethod
    def sums(self, module: nn.Module, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the sums of a micro-batch. Call `module`, which wraps `model` and runs the strategy's collectives."""

    def named(self, means: list[float]) -> dict[str, float]:
        """Return the loss, several terms, and the metrics, given the sums after the division.

        There is no metric of which the batch has no items, so that it is not a number.
        """
        terms = means[: len(self.terms)]
        named = dict(zip(self.terms, terms, strict=True)) if len(terms) > 1 else {}
        metrics = zip(self.metrics, means[len(terms) :], strict=True)
        return {"loss": math.fsum(terms)} | named | {name: mean for name, mean in metrics if not math.isnan(mean)}


class Supervised(Objective):
    """The cross-entropy of the trained tokens."""

    bounds_loss = has_perplexity = True

    def counts(self, batch: Batch) -> torch.Tensor:
        return trained_tokens(batch)[None]

    def sums(self, module: nn.Module, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        # with num_items_in_batch=1, the model returns the sum instead of the mean
        return module(**model_inputs(model, batch), num_items_in_batch=1, use_cache=False).loss


class Answers(NamedTuple):
    """Pairs of one micro-batch. Each tensor has the shape (rows, pairs)."""

    chosen: torch.Tensor
    """Log-probability of the chosen answer."""
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    exist: torch.Tensor
    """Whether there is a pair. Rows have different numbers of them."""
    chosen_reference: torch.Tensor
    """Log-probability under the base model, or 0 without a reference."""
    rejected_reference: torch.Tensor


class Preference(Objective):
    """A loss of pairs. Documents 2 k and 2 k + 1 of a packed row are a chosen and a rejected answer."""

    task = "preference"
    has_token_losses = True
    metrics = (
        *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    )

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    def counts(self, batch: Batch) -> torch.Tensor:
        pairs = pair_up(document_tokens(batch)).amin(-1).gt(0).sum()
        return pairs.repeat(self.size)

    def sums(self, module: nn.Module, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        sums, tokens = pair_up(document_logps(module, model, batch)), pair_up(document_tokens(batch))
        reference = pair_up(batch["reference"][:, 0]) if self.has_reference else torch.zeros_like(sums)
        exist = tokens.amin(-1) > 0
        parts = (*sums.unbind(-1), *tokens.clamp(min=1).unbind(-1), exist, *reference.unbind(-1))
        pairs = Answers(*parts)
        zero = sums.new_zeros(())
        found = [*self.losses(pairs), *self.measures(pairs)]
        # not a product with `exist`, in which 0 x infinity would be undefined
        return torch.stack([torch.where(exist, value, zero).sum() for value in found])

    @abstractmethod
    def losses(self, pairs: Answers) -> list[torch.Tensor]:
        """Return each term of each pair."""

    def measures(self, pairs: Answers) -> list[torch.Tensor]:
        """Return each metric of each pair."""
        chosen, rejected = (reward.detach() for reward in self.rewards(pairs))
        accurate = (chosen > rejected).float()
        return [chosen, rejected, chosen - rejected, accurate, pairs.chosen.detach(), pairs.rejected.detach()]

    def rewards(self, pairs: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the implicit rewards of the chosen and the rejected answers."""
        return self.options.beta * pairs.chosen, self.options.beta * pairs.rejected


class DPO(Preference):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, eq. 7)."""

    has_reference = True

    def losses(self, pairs: Answers) -> list[torch.Tensor]:
        return [-functional.logsigmoid(self.margins(pairs))]

    def margins(self, pairs: Answers) -> torch.Tensor:
        chosen, rejected = self.rewards(pairs)
        return chosen - rejected

    def rewards(self, pairs: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        beta = self.options.beta
        return beta * (pairs.chosen - pairs.chosen_reference), beta * (pairs.rejected - pairs.rejected_reference)


class IPO(DPO):
    """Identity preference optimization (Azar et al. 2023, arXiv:2310.12036, eq. 17), per token as in TRL."""

    def losses(self, pairs: Answers) -> list[torch.Tensor]:
        chosen = (pairs.chosen - pairs.chosen_reference) / pairs.chosen_tokens
        rejected = (pairs.rejected - pairs.rejected_reference) / pairs.rejected_tokens
        return [(chosen - rejected - 1 / (2 * self.options.beta)) ** 2]


class RobustDPO(DPO):
    """DPO for labels of which a share is wrong (Ray Chowdhury et al. 2024, arXiv:2403.00409, eq. 12)."""

    def losses(self, pairs: Answers) -> list[torch.Tensor]:
        wrong, margins = self.options.label_smoothing, self.margins(pairs)
        right = (1 - wrong) * -functional.logsigmoid(margins) + wrong * functional.logsigmoid(-margins)
        return [right / (1 - 2 * wrong)]


class SimPO(Preference):
    """Simple preference optimization, without a reference (Meng et al. 2024, arXiv:2405.14734, eq. 6)."""

    def losses(self, pairs: Answers) -> list[torch.Tensor]:
        chosen, rejected = self.rewards(pairs)
        return [-functional.logsigmoid(chosen - rejected - self.options.simpo_gamma)]

    def rewards(self, pairs: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        beta = self.options.beta
        return beta * pairs.chosen / pairs.chosen_tokens, beta * pairs.rejected / pairs.rejected_tokens


class ORPO(Preference):
    """Odds ratio preference optimization, without a reference (Hong et al. 2024, arXiv:2403.07691, eq. 6).

    The cross-entropy of the chosen answers is a mean over their tokens, and the odds ratio one over pairs.
    """

    terms = ("nll_loss", "odds_ratio_loss")

    def counts(self, batch: Batch) -> torch.Tensor:
        tokens = pair_up(document_tokens(batch))
        exist = tokens.amin(-1) > 0
        return torch.stack([(tokens[..., 0] * exist).sum().long(), *super().counts(batch)[1:]])

    def losses(self, pairs: Answers) -> list[torch.Tensor]:
        chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
        odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
        return [-pairs.chosen, -self.options.beta * functional.logsigmoid(odds)]

    rewards = SimPO.rewards


def _log1mexp(value: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(value)) of values below 0. A probability of 1 would make the gradient infinite."""
    return torch.log(-torch.expm1(value.clamp(max=-1e-6)))


PREFERENCES: dict[str, type[Preference]] = {
    "dpo": DPO,
    "ipo": IPO,
    "robust": RobustDPO,
    "simpo": SimPO,
    "orpo": ORPO,
}


def make(options: TrainOptions) -> Objective:
    """Return the objective that the options name."""
    from raymill.training.kto import KTO

    if options.objective == "kto":
        return KTO(options)
    return Supervised() if options.objective == "supervised" else PREFERENCES[options.objective](options)


def document_logps(module: nn.Module, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the log-probability of the trained tokens of each document, of shape (rows, documents), in fp32.

    A row with fewer documents has zeros, and so has its padding.
    """
    losses = module(**model_inputs(model, batch), use_cache=False).loss
    at_token = functional.pad(losses[:, :-1], (1, 0))  # the loss at a token is that of the next one
    return -document_sums(torch.where(is_trained(batch), at_token, 0.0), batch)


def document_tokens(batch: Batch) -> torch.Tensor:
    """Return the number of trained tokens of each document, of shape (rows, documents)."""
    return document_sums(is_trained(batch).float(), batch)


def is_trained(batch: Batch) -> torch.Tensor:
    """Return which tokens are trained. Nothing predicts the first one of a document."""
    return (batch["labels"] != NOT_TRAINED) & (batch["position_ids"] != 0)


def document_numbers(batch: Batch) -> torch.Tensor:
    """Return the number of the document in its row that each token belongs to."""
    return (batch["position_ids"] == 0).cumsum(1) - 1


def document_sums(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    documents = document_numbers(batch)
    return values.new_zeros(batch["document_starts"].shape).scatter_add(1, documents, values)


def pair_up(values: torch.Tensor) -> torch.Tensor:
    """Return values of documents as (rows, pairs, 2)."""
    return functional.pad(values, (0, values.shape[1] % 2)).unflatten(1, (-1, 2))
