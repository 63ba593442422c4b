"""Evaluate models on the rows that preprocess held out: perplexity, exact match, and whether answers end."""

from pipeline.evaluation.options import EvaluateOptions
from pipeline.ray_support import cli

if __name__ == "__main__":
    cli.parse(EvaluateOptions, "evaluate")  # before the imports below, which take seconds

import json
import math
from typing import Any, NamedTuple

import ray.data
import torch
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayTaskError
from rich.console import Console
from rich.table import Table

import settings
from pipeline.evaluation import candidates
from pipeline.evaluation.candidates import Candidate
from pipeline.evaluation.scoring import Scorer
from pipeline.ray_support import capacity, ray_data
from pipeline.ray_support.progress import Progress, time_left
from pipeline.training import storage
from pipeline.training.dataset import Manifest, PackedRows, read_manifest
from settings import UserError


class Result(NamedTuple):
    """What one model is worth."""

    model: str
    loss: float
    """Mean cross-entropy of a trained token, in nats."""
    perplexity: float
    exact_match: float
    """Share of the answers, 0 to 1, that greedy decoding gives token for token."""
    stops: float
    """Share of a few generated answers, 0 to 1, that the model ends by itself."""
    tokens_per_s: float
    """Of one worker, padding included."""


def main(options: EvaluateOptions) -> None:
    """Measure perplexity and exact match of models on held-out rows, and compare them with the last one."""
    paths = {"data": settings.resolve(options.data), "output": settings.resolve(options.output)}
    options = options.model_copy(update=paths)
    manifest, rows = read_manifest(options.data), len(PackedRows(options.data, "eval"))
    if not rows:
        raise UserError(f"{options.data} holds no rows for evaluation; run preprocess with a larger --eval-share.")
    found = [candidates.find(model) for model in options.models]
    for candidate in found:
        candidates.check(candidate, options.data, manifest)
    cli.connect()
    _check_cluster(options, found)
    sums = [_evaluate(candidate, options, rows) for candidate in found]
    results = [_result(candidate, of_one) for candidate, of_one in zip(found, sums, strict=True)]
    _show(results, sums[0])
    _save(results, sums[0], options, manifest)


def _check_cluster(options: EvaluateOptions, found: list[Candidate]) -> None:
    device = "GPU" if options.device == "cuda" else "CPU"
    capacity.refuse_too_many_workers(options.num_workers, {device: 1}, "device in [evaluate]")
    paths = {"data": options.data, "output": options.output}
    for candidate in found:
        for location in filter(None, (candidate.model, candidate.adapter)):
            capacity.refuse_private_paths(paths | {"models": location}, options.shared_paths, "evaluate")


def _evaluate(candidate: Candidate, options: EvaluateOptions, rows: int) -> dict[str, float]:
    """The sums of `Scorer` over all held-out rows."""
    pieces = [
        {"first": first, "rows": min(options.batch_rows, rows - first)} for first in range(0, rows, options.batch_rows)
    ]
    with DataContext.current(ray_data.quiet_context()), Progress(_Line(candidate.name, rows)) as progress:
        scores = ray.data.from_items(pieces, override_num_blocks=len(pieces)).map(
            Scorer,
            fn_constructor_args=(candidate, options.data, options.device, options.precision, progress.report),
            compute=ActorPoolStrategy(size=min(options.num_workers, len(pieces))),
            num_gpus=1 if options.device == "cuda" else None,
        )
        try:
            scored = scores.take_all()
        except RayTaskError as error:
            raise _explained(error, options) from None
    return {name: sum(piece[name] for piece in scored) for name in scored[0]}


def _explained(error: RayTaskError, options: EvaluateOptions) -> Exception:
    """What to tell a person about a worker that failed: one sentence where its memory is at fault."""
    if isinstance(error.cause, torch.OutOfMemoryError):
        return UserError(
            f"a GPU has no room for {options.batch_rows} rows in one forward pass; pass a smaller --batch-rows."
        )
    return error


class _Line:
    """The progress line of one model."""

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


def _result(candidate: Candidate, sums: dict[str, float]) -> Result:
    loss = sums["loss"] / sums["trained_tokens"]
    return Result(
        model=candidate.name,
        loss=loss,
        perplexity=math.exp(loss),
        exact_match=sums["exact"] / sums["answers"],
        stops=sums["stopped"] / max(1, sums["generated"]),
        tokens_per_s=sums["tokens"] / sums["seconds"],
    )


def _show(results: list[Result], counts: dict[str, float]) -> None:
    console = Console(highlight=False, width=120)  # a submitted job's log is no terminal
    console.print(
        f"held out: {counts['documents']:,} documents with {counts['answers']:,} answers, "
        f"{counts['trained_tokens']:,} trained tokens; in brackets: the difference to {results[-1].model}"
    )
    console.print(f"stops by itself: the share of {counts['generated']:.0f} answers to held-out questions that end")
    table = Table(box=None)
    table.add_column("model", overflow="fold")
    for column in ("loss", "perplexity", "exact match", "stops by itself", "tokens/s a worker"):
        table.add_column(column, justify="right")
    for result in results[:-1]:
        table.add_row(*_cells(result, results[-1]))
    table.add_row(*_cells(results[-1]))
    console.print(table)


def _cells(result: Result, base: Result | None = None) -> list[str]:
    cells = [f"{result.loss:.4f}", f"{result.perplexity:.2f}", f"{result.exact_match:.1%}", f"{result.stops:.0%}"]
    if base:
        differences = [
            f" ({result.loss - base.loss:+.4f})",
            f" ({result.perplexity - base.perplexity:+.2f})",
            f" ({result.exact_match - base.exact_match:+.1%})",
            f" ({result.stops - base.stops:+.0%})",
        ]
        cells = [cell + difference for cell, difference in zip(cells, differences, strict=True)]
    return [result.model, *cells, f"{result.tokens_per_s:,.0f}"]


def _save(results: list[Result], counts: dict[str, float], options: EvaluateOptions, manifest: Manifest) -> None:
    saved: dict[str, Any] = {
        "data": options.data,
        "content_hash": manifest.content_hash,
        "precision": options.precision,
        **{name: counts[name] for name in ("documents", "answers", "trained_tokens")},
        "models": [result._asdict() for result in results],
    }
    file = f"{options.output}/{options.name}.json"
    storage.write_text(file, json.dumps(saved, indent=2) + "\n")
    print(f"the result is in {file}", flush=True)


if __name__ == "__main__":
    cli.run(main)
