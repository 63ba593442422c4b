"""Measures how often reward models prefer the chosen answer of a held-out pair."""

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from raymill.evaluation import evaluation
from raymill.evaluation.candidates import Candidate
from raymill.evaluation.options import EvaluateOptions
from raymill.evaluation.scoring import Metric, Scorer, name_of
from raymill.training import reward, reward_config, storage, weights_check
from raymill.training.dataset import Manifest
from raymill.training.pairs import existing_pairs, pair_up


class RewardScorer(Scorer):
    """A reward model, loaded once on a device, that scores held-out pairs by the position of their rows."""

    def __init__(self, candidate: Candidate, *arguments: Any) -> None:
        super().__init__(candidate, *arguments)
        reward.use_scores(self._model, weights_check.stored_weight(candidate.model, reward_config.HEAD))
        self._model.to(self._device)  # the head

    @torch.no_grad()
    def __call__(self, piece: dict[str, int]) -> dict[str, float]:
        """Return sums over the pairs in the `rows` rows from position `first`, and the `seconds` taken."""
        started = time.perf_counter()
        batch = self._to_device(self._rows.read(piece["first"], piece["rows"]))
        exist = existing_pairs(batch)
        chosen, rejected = pair_up(reward.document_scores(self._model, self._model, batch))[exist].unbind(-1)
        margins = chosen - rejected
        sums = {
            "pairs": int(exist.sum()),
            "accurate": int((margins > 0).sum()),
            "margins": float(margins.sum()),
            "loss": float(-functional.logsigmoid(margins).sum()),
            "tokens": batch["input_ids"].numel(),
        }
        self._report(rows=piece["rows"])
        return sums | {"seconds": time.perf_counter() - started}


class RewardResult(NamedTuple):
    """The metrics of one reward model."""

    model: str
    accuracy: float
    """Share of the pairs whose chosen answer has the larger score, from 0 to 1."""
    margin: float
    """Mean difference between the scores of the chosen and the rejected answer."""
    loss: float
    """Mean of -log sigmoid(margin)."""
    tokens_per_s: float
    """Number of tokens that one worker processes per second, including padding."""


def evaluate_all(
    found: Sequence[Candidate],
    options: EvaluateOptions,
    rows: int,
    manifest: Manifest,
    unused: Sequence[Metric] = (),
) -> None:
    """Score all reward models, print a table that compares each with the last one, and save it.

    Args:
        unused: the user's metrics, which need logits.
    """
    if unused:
        print(f"note: {', '.join(map(name_of, unused))} cannot be measured, because reward models have no logits")
    sums = [evaluation.evaluate(candidate, options, rows, scorer=RewardScorer) for candidate in found]
    results = [_result(candidate, totals) for candidate, totals in zip(found, sums, strict=True)]
    pairs = int(sums[0]["pairs"])
    console = Console(highlight=False, width=120)  # the log of a submitted job has no terminal width
    console.print(f"held out: {pairs:,} pairs; in parentheses: the difference from {results[-1].model}")
    table = Table(box=None)
    table.add_column("model", overflow="fold")
    for column in ("accuracy", "margin", "loss", "tokens/s per worker"):
        table.add_column(column, justify="right")
    for result in results[:-1]:
        table.add_row(*_cells(result, results[-1]))
    table.add_row(*_cells(results[-1]))
    console.print(table)
    content = {
        "data": options.data,
        "content_hash": manifest.content_hash,
        "precision": options.precision,
        "pairs": pairs,
        "models": [result._asdict() for result in results],
    }
    file = f"{options.output}/{options.name}.json"
    storage.write_text(file, json.dumps(content, indent=2) + "\n")
    print(f"the result is in {file}", flush=True)


def _result(candidate: Candidate, sums: dict[str, float]) -> RewardResult:
    accuracy, margin, loss = (sums[name] / sums["pairs"] for name in ("accurate", "margins", "loss"))
    return RewardResult(candidate.name, accuracy, margin, loss, sums["tokens"] / sums["seconds"])


def _cells(result: RewardResult, base: RewardResult | None = None) -> list[str]:
    formats = {"accuracy": ".1%", "margin": ".4f", "loss": ".4f"}
    cells = []
    for name, form in formats.items():
        value = getattr(result, name)
        difference = f" ({value - getattr(base, name):+{form}})" if base else ""
        cells.append(f"{value:{form}}{difference}")
    return [result.model, *cells, f"{result.tokens_per_s:,.0f}"]
