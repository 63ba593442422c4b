"""Turns the sums of an evaluation into metrics, and shows and saves them."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from raymill.evaluation import scoring
from raymill.evaluation.candidates import Candidate
from raymill.evaluation.options import EvaluateOptions
from raymill.training import storage
from raymill.training.dataset import Manifest


class EvaluationResult(NamedTuple):
    """The metrics of one model."""

    model: str
    loss: float
    """Mean cross-entropy per trained token, in nats."""
    perplexity: float
    exact_match: float
    """Share of the answers that greedy decoding reproduces token for token, from 0 to 1."""
    stops: float
    """Share of a few generated answers that end with a stop token, from 0 to 1."""
    tokens_per_s: float
    """Number of tokens that one worker processes per second, including padding."""
    own: dict[str, float | None]
    """The user's own metrics, by name. None if there was nothing to measure."""


def from_sums(candidate: Candidate, sums: dict[str, float], metrics: Sequence[scoring.Metric] = ()) -> EvaluationResult:
    """Return the metrics from sums over all held-out rows. `metrics` are the user's own."""
    loss = sums["loss"] / sums["trained_tokens"]
    return EvaluationResult(
        model=candidate.name,
        loss=loss,
        perplexity=math.exp(loss),
        exact_match=sums["exact"] / sums["answers"],
        stops=sums["stopped"] / max(1, sums["generated"]),
        tokens_per_s=sums["tokens"] / sums["seconds"],
        own={name: _own(name, sums) for name in map(scoring.name_of, metrics)},
    )


def _own(name: str, sums: dict[str, float]) -> float | None:
    total, items = (sums[key] for key in scoring.own_keys(name))
    return total / items if items else None


def print_table(results: list[EvaluationResult], counts: dict[str, float]) -> None:
    """Print all results, with their differences from the last one."""
    console = Console(highlight=False, width=120)  # the log of a submitted job has no terminal width
    console.print(
        f"held out: {counts['documents']:,} documents with {counts['answers']:,} answers, "
        f"{counts['trained_tokens']:,} trained tokens; in parentheses: the difference from {results[-1].model}"
    )
    console.print(f"stops: share of {counts['generated']:.0f} generated answers that end with a stop token")
    table = Table(box=None)
    table.add_column("model", overflow="fold")
    for column in ("loss", "perplexity", "exact match", "stops", *results[-1].own, "tokens/s per worker"):
        table.add_column(column, justify="right")
    for result in results[:-1]:
        table.add_row(*_cells(result, results[-1]))
    table.add_row(*_cells(results[-1]))
    console.print(table)


def save(
    results: list[EvaluationResult], counts: dict[str, float], options: EvaluateOptions, manifest: Manifest
) -> None:
    """Write the results to NAME.json in the output folder."""
    content: dict[str, Any] = {
        "data": options.data,
        "content_hash": manifest.content_hash,
        "precision": options.precision,
        **{name: counts[name] for name in ("documents", "answers", "trained_tokens")},
        "models": [result._asdict() for result in results],
    }
    file = f"{options.output}/{options.name}.json"
    storage.write_text(file, json.dumps(content, indent=2) + "\n")
    print(f"the result is in {file}", flush=True)


def _cells(result: EvaluationResult, base: EvaluationResult | None = None) -> list[str]:
    cells = [f"{result.loss:.4f}", f"{result.perplexity:.2f}", f"{result.exact_match:.1%}", f"{result.stops:.0%}"]
    if base:
        differences = [
            f" ({result.loss - base.loss:+.4f})",
            f" ({result.perplexity - base.perplexity:+.2f})",
            f" ({result.exact_match - base.exact_match:+.1%})",
            f" ({result.stops - base.stops:+.0%})",
        ]
        cells = [cell + difference for cell, difference in zip(cells, differences, strict=True)]
    own = [_own_cell(value, base.own[name] if base else None) for name, value in result.own.items()]
    return [result.model, *cells, *own, f"{result.tokens_per_s:,.0f}"]


def _own_cell(value: float | None, base: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if base is None else f"{value:.4f} ({value - base:+.4f})"
