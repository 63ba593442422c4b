"""Losses of pairs of a chosen and a rejected answer, of which the model should prefer the first."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from raymill.training.dataset import Batch
from raymill.training.objectives import Objective, document_logps, document_tokens
from raymill.training.options import TrainOptions


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
    output = "token_losses"
    metrics = (
        *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    )

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    def counts(self, batch: Batch) -> torch.Tensor:
        return existing_pairs(batch).sum().repeat(self.size)

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


def existing_pairs(batch: Batch) -> torch.Tensor:
    """Return which pairs exist, of shape (rows, pairs). Rows have different numbers of them."""
    return pair_up(document_tokens(batch)).amin(-1) > 0


def pair_up(values: torch.Tensor) -> torch.Tensor:
    """Return values of documents as (rows, pairs, 2)."""
    return functional.pad(values, (0, values.shape[1] % 2)).unflatten(1, (-1, 2))
