"""Scores models on all held-out rows with Ray Data actors, and shows and saves their metrics."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray.data
import torch
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayTaskError
from rich.console import Console
from rich.table import Table

from raymill.errors import UserError
from raymill.evaluation import scoring
from raymill.evaluation.candidates import Candidate
from raymill.evaluation.options import EvaluateOptions
from raymill.evaluation.scoring import Metric, Scorer
from raymill.ray_support import ray_logging
from raymill.ray_support.progress import Progress, time_left
from raymill.training import held_out, storage
from raymill.training.dataset import Manifest


def evaluate(
    candidate: Candidate,
    options: EvaluateOptions,
    rows: int,
    metrics: Sequence[Metric] = (),
    scorer: Callable[..., Any] = Scorer,
) -> dict[str, float]:
    """Return the sums of the values of a class such as `Scorer` over all held-out rows. `metrics` are the user's own.

    Raises:
        UserError: a GPU has too little memory, a file of the rows is damaged, or two metrics have the same name.
    """
    names = [scoring.name_of(metric) for metric in metrics]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two metrics in jobs/evaluate.py have the name {twice.pop()}; rename one.")
    pieces = [
        {"first": first, "rows": min(options.batch_rows, rows - first)} for first in range(0, rows, options.batch_rows)
    ]
    describe = EvaluateProgress(candidate.name, rows)
    with DataContext.current(ray_logging.quiet_context()), Progress(describe) as progress:
        scores = ray.data.from_items(pieces, override_num_blocks=len(pieces)).map(
            scorer,
            fn_constructor_args=(candidate, options.data, options.device, options.precision, metrics, progress.report),
            compute=ActorPoolStrategy(size=min(options.num_workers, len(pieces))),
            num_gpus=1 if options.device == "cuda" else None,
        )
        try:
            scored = scores.take_all()
        except RayTaskError as error:
            raise explain(error, options) from None
    return {name: sum(piece[name] for piece in scored) for name in scored[0]}


def explain(error: RayTaskError, options: EvaluateOptions) -> Exception:
    """Return a UserError if a GPU ran out of memory or a worker raised one, otherwise `error`."""
    if isinstance(error.cause, UserError):
        return UserError(str(error.cause).splitlines()[0])  # Ray adds its own advice on the following lines
    if isinstance(error.cause, torch.OutOfMemoryError):
        return UserError(
            f"a GPU has no room for {options.batch_rows} rows in one forward pass; pass a smaller --batch-rows."
        )
    return error


class EvaluateProgress:
    """Formats the progress line for the evaluation of one model."""

    def __init__(self, model: str, rows: int) -> None:
        self._model, self._rows = model, rows
        self._loaded_after_s = 0.0

    def __call__(self, totals: dict[str, int], seconds: float) -> str:
        done = totals.get("rows", 0)
        if not done:
            self._loaded_after_s = seconds
            return f"{self._model}: starting workers: {seconds:.0f} s"
        seconds -= self._loaded_after_s
        left = time_left(done, self._rows, seconds)
        return f"{self._model}: {done:,} of {self._rows:,} rows, {done / seconds:,.1f} rows/s, {left}"


class EvaluationResult(NamedTuple):
    """The metrics of one model."""

    model: str
    loss: float
    """Mean cross-entropy per trained token, in nats."""
    perplexity: float | None
    """None: it is too large for a float."""
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
        perplexity=held_out.perplexity(loss),
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
        "models": [_finite(result._asdict()) for result in results],
    }
    file = f"{options.output}/{options.name}.json"
    storage.write_text(file, json.dumps(content, indent=2) + "\n")
    print(f"the result is in {file}", flush=True)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite with None, because JSON does not have them."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return _finite(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: replaced(value) for name, value in values.items()}


def _cells(result: EvaluationResult, base: EvaluationResult | None = None) -> list[str]:
    shares = [f"{result.exact_match:.1%}", f"{result.stops:.0%}"]
    if base:
        differences = [
            f" ({result.exact_match - base.exact_match:+.1%})",
            f" ({result.stops - base.stops:+.0%})",
        ]
        shares = [share + difference for share, difference in zip(shares, differences, strict=True)]
    loss = _cell(result.loss, base.loss if base else None)
    perplexity = _cell(result.perplexity, base.perplexity if base else None, digits=2)
    own = [_cell(value, base.own[name] if base else None) for name, value in result.own.items()]
    return [result.model, loss, perplexity, *shares, *own, f"{result.tokens_per_s:,.0f}"]


def _cell(value: float | None, base: float | None, digits: int = 4) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + ("" if base is None else f" ({value - base:+.{digits}f})")
