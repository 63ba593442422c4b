"""Scores a model on all held-out rows, with Ray Data actors that each hold a copy of the model."""

from collections.abc import Sequence

import ray.data
import torch
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayTaskError

from raymill.errors import UserError
from raymill.evaluation import scoring
from raymill.evaluation.candidates import Candidate
from raymill.evaluation.options import EvaluateOptions
from raymill.evaluation.scoring import Metric, Scorer
from raymill.ray_support import ray_data
from raymill.ray_support.progress import Progress, time_left


def evaluate(
    candidate: Candidate, options: EvaluateOptions, rows: int, metrics: Sequence[Metric] = ()
) -> dict[str, float]:
    """Return the sums of `Scorer`'s values over all held-out rows. `metrics` are the user's own.

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
    with DataContext.current(ray_data.quiet_context()), Progress(describe) as progress:
        scores = ray.data.from_items(pieces, override_num_blocks=len(pieces)).map(
            Scorer,
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
