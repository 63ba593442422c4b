"""What training minimizes: the `Objective` interface, the cross-entropy of answers, and sums over documents."""

import math
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from raymill.data.options import Task
from raymill.data.tokenization import NOT_TRAINED
from raymill.training.dataset import Batch, trained_tokens
from raymill.training.packed_attention import model_inputs
from raymill.training.ranking import Ranking

Output = Literal["loss", "token_losses", "scores"]


class Objective(ABC):
    """Sums over micro-batches, each with what it is divided by in the global batch.

    The first sums are terms of the loss, which is their sum after the division. The others are metrics.
    """

    task: Task = "supervised"
    """The rows that it needs."""
    terms: tuple[str, ...] = ("loss",)
    """Names of the terms. Several are also logged one by one."""
    metrics: tuple[str, ...] = ()
    output: Output = "loss"
    """What the model returns: its loss, the loss of each token, or the score of each document. Only the first one may
    have dropout."""
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

        A metric without items in the batch is left out.
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
