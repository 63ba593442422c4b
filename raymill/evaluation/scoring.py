"""Scores a model on packed rows: loss, exact answers of greedy decoding, and how many answers end with a stop token."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import logging

from raymill.data.options import Task
from raymill.data.tokenization import NOT_TRAINED
from raymill.data.tokenizer import eos_ids, load_tokenizer
from raymill.errors import UserError
from raymill.evaluation.candidates import Candidate
from raymill.model_config import context_length
from raymill.ray_support import model_cache
from raymill.training import composite, objectives
from raymill.training.dataset import Batch, PackedRows, read_manifest, trained_tokens
from raymill.training.packed_attention import model_inputs
from raymill.training.pairs import pair_up

Metric = Callable[[PreTrainedModel, Batch, torch.Tensor], tuple[float, float]]
"""A metric of the user: a function of a model, a batch of packed rows, and the model's logits for the batch, with the
shape (rows, length, vocabulary). It returns a sum and a number of items, and the metric is the mean over all batches.
"""


class Score(NamedTuple):
    """Sums over packed rows."""

    loss: float
    """Cross-entropy of the trained tokens, in nats."""
    trained_tokens: int
    documents: int
    """Number of documents with a trained token. Padding is not a document."""
    answers: int
    """Number of answers. An answer is a run of trained tokens, such as an assistant turn with its stop token."""
    exact: int
    """Number of answers that greedy decoding reproduces token for token."""


@torch.no_grad()
def score(
    model: PreTrainedModel, batch: Batch, metrics: Sequence[Metric] = (), task: Task = "supervised"
) -> tuple[Score, dict[str, tuple[float, float]]]:
    """Return the score of `model` on a batch of packed rows, and the results of metrics, from one forward pass.

    Of pairs, the score is that of the chosen answers, and the metrics see both.

    Greedy decoding reproduces an answer if each of its tokens is the most likely one after the tokens before it. Until
    the first wrong token, it sees the same tokens as this forward pass.
    """
    good = only_good(batch, task)
    # with num_items_in_batch=1, the loss is a sum, not a mean
    output = model(**model_inputs(model, good), num_items_in_batch=1, use_cache=False)
    labels = good["labels"][:, 1:]
    trained = labels != NOT_TRAINED
    wrong = trained & (output.logits[:, :-1].argmax(-1) != labels)
    begins = trained & ~functional.pad(trained, (1, 0))[:, :-1]
    answers = int(begins.sum())
    counts = Score(
        loss=float(output.loss),
        trained_tokens=int(trained_tokens(good)),
        documents=_count_segments(good["labels"] != NOT_TRAINED, begins=batch["position_ids"] == 0),
        answers=answers,
        exact=answers - _count_segments(wrong, begins),
    )
    return counts, {name_of(metric): _measure(metric, model, batch, output.logits) for metric in metrics}


def only_good(batch: Batch, task: Task) -> Batch:
    """Return a batch in which no rejected answer of a pair, and no bad answer, is trained."""
    if task == "supervised":
        return batch
    is_bad = objectives.document_numbers(batch) % 2 == 1 if task == "preference" else batch["is_good"] == 0
    return batch | {"labels": batch["labels"].masked_fill(is_bad, NOT_TRAINED)}


def chosen_is_likelier(model: PreTrainedModel, batch: Batch, logits: torch.Tensor) -> tuple[float, float]:
    """Return how many pairs have a chosen answer that is likelier than the rejected one, and the number of pairs."""
    return _compare(batch, logits, per_token=False)


def chosen_is_likelier_per_token(model: PreTrainedModel, batch: Batch, logits: torch.Tensor) -> tuple[float, float]:
    """Return the same for the mean log-probability of a token, which does not favor short answers."""
    return _compare(batch, logits, per_token=True)


def good_logp(model: PreTrainedModel, batch: Batch, logits: torch.Tensor) -> tuple[float, float]:
    """Return the log-probability of good answers, and the number of their tokens."""
    return _logp(batch, logits, good=True)


def bad_logp(model: PreTrainedModel, batch: Batch, logits: torch.Tensor) -> tuple[float, float]:
    """Return the same for bad answers."""
    return _logp(batch, logits, good=False)


METRICS_OF_TASK: dict[Task, tuple[Metric, ...]] = {
    "supervised": (),
    "preference": (chosen_is_likelier, chosen_is_likelier_per_token),
    "unpaired_preference": (good_logp, bad_logp),
}


def _logps(batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each trained token, of shape (rows, length), and 0 at other tokens."""
    losses = functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return torch.where(objectives.is_trained(batch), -functional.pad(losses, (1, 0)), 0.0)


def _logp(batch: Batch, logits: torch.Tensor, *, good: bool) -> tuple[float, float]:
    these = objectives.is_trained(batch) & ((batch["is_good"] > 0) == good)
    return float(_logps(batch, logits)[these].sum()), float(these.sum())


def _compare(batch: Batch, logits: torch.Tensor, *, per_token: bool) -> tuple[float, float]:
    logps = objectives.document_sums(_logps(batch, logits), batch)
    tokens = objectives.document_tokens(batch)
    pairs = pair_up(logps / tokens.clamp(min=1) if per_token else logps)
    exist = pair_up(tokens).amin(-1) > 0
    return float(((pairs[..., 0] > pairs[..., 1]) & exist).sum()), float(exist.sum())


def _measure(metric: Metric, model: PreTrainedModel, batch: Batch, logits: torch.Tensor) -> tuple[float, float]:
    found = metric(model, batch, logits)
    if not isinstance(found, tuple) or len(found) != 2:
        raise UserError(f"the metric {metric.__name__} returns {found!r}; return a sum and a number of items.")
    total, items = found
    return float(total), float(items)


def name_of(metric: Metric) -> str:
    """Return the name of a metric in the table and in the result."""
    return metric.__name__.replace("_", " ")


def own_keys(name: str) -> tuple[str, str]:
    """Return the keys of the sum and the number of items of an own metric, in the result of `Scorer`."""
    return f"sum of {name}", f"items of {name}"


def _count_segments(marked: torch.Tensor, begins: torch.Tensor) -> int:
    """Return how many segments have a marked token.

    `begins` marks the first token of each segment. Both tensors have the shape (rows, length).
    """
    number = begins.flatten().cumsum(0)
    return len(number[marked.flatten()].unique())


class Scorer:
    """A model, loaded once on a device, that scores held-out rows by position."""

    def __init__(
        self,
        candidate: Candidate,
        data: str,
        device: str,
        precision: str,
        metrics: Sequence[Metric],
        report: Callable[..., Any],
    ) -> None:
        """Load the model. `data` is the folder or URI of the packed data. Each call then ends with `report(rows=…)`."""
        self._metrics = metrics
        self._device = torch.device(device)
        self._model = load(candidate, torch.bfloat16 if precision == "bf16" else torch.float32).to(self._device).eval()
        self._rows, self._task = PackedRows(data, "eval"), read_manifest(data).task
        self._eos_ids = eos_ids(candidate.model, load_tokenizer(candidate.model))
        self._report = report

    def __call__(self, piece: dict[str, int]) -> dict[str, float]:
        """Return the score of the `rows` rows from position `first`, their number of `tokens`, and the `seconds` taken.

        The call with the first rows also generates a few answers. `generated` is their number, and `stopped` is how
        many of them end with a stop token. Other calls return 0 for both.
        """
        generated, stopped = self._count_stops() if piece["first"] == 0 else (0, 0)
        started = time.perf_counter()
        batch = self._rows.read(piece["first"], piece["rows"])
        scored, own = score(self._model, self._to_device(batch), self._metrics, self._task)
        self._report(rows=piece["rows"])
        seconds = time.perf_counter() - started
        counts = {"tokens": batch["input_ids"].numel(), "generated": generated, "stopped": stopped}
        sums = {key: value for name, pair in own.items() for key, value in zip(own_keys(name), pair, strict=True)}
        return scored._asdict() | counts | {"seconds": seconds} | sums

    def _count_stops(self) -> tuple[int, int]:
        batch = self._rows.read(0, min(QUESTIONS, len(self._rows)))
        return count_stops(self._model, only_good(self._to_device(batch), self._task), self._eos_ids)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: column.to(self._device) for name, column in batch.items()}


def load(candidate: Candidate, dtype: torch.dtype) -> PreTrainedModel:
    """Return the candidate's model in main memory. A model at a URI is copied to this node first."""
    logging.disable_progress_bar()
    model = composite.from_pretrained(model_cache.on_this_node(candidate.model), dtype=dtype)
    if candidate.adapter:
        from peft import PeftModel  # imported late, because it takes seconds and only adapters need it

        model = PeftModel.from_pretrained(model, model_cache.on_this_node(candidate.adapter))
    return model


QUESTIONS = 8
MAX_TOKENS = 128  # longer answers count as not stopped


@torch.no_grad()
def count_stops(model: PreTrainedModel, batch: Batch, eos_ids: Collection[int]) -> tuple[int, int]:
    """Return how many answers were generated greedily, and how many of them end in one of `eos_ids`.

    A question is a document up to its first trained token. Only the first QUESTIONS questions of `batch` that leave
    room for an answer in the model's context are used.
    """
    context = context_length(model.config) or sys.maxsize
    questions = [question for question in _questions(batch) if len(question) < context][:QUESTIONS]
    stopped = 0
    for question in questions:
        answer = model.generate(
            question[None],
            attention_mask=torch.ones_like(question[None]),
            do_sample=False,
            max_new_tokens=min(MAX_TOKENS, context - len(question)),
            eos_token_id=sorted(eos_ids),
            pad_token_id=0,
        )
        stopped += int(answer[0, -1]) in eos_ids
    return len(questions), stopped


def _questions(batch: Batch) -> list[torch.Tensor]:
    found = []
    for tokens, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, stop in pairwise(starts):
            trained = (labels[start:stop] != NOT_TRAINED).nonzero().flatten()
            if len(trained) and trained[0] > 0:
                found.append(tokens[start : start + int(trained[0])])
    return found
