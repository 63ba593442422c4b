"""Says which of several models is better, by one metric of their evaluations, and when a run should stop early."""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel

WORST = sys.float_info.max
"""The score of a model without a finite value. JSON has no infinity."""

Evaluated = TypeVar("Evaluated", bound=Mapping[str, Any])


class Ranking(NamedTuple):
    """A metric of evaluations, and whether small or large values are good."""

    metric: str = "eval_loss"
    mode: Literal["min", "max"] = "min"

    @property
    def title(self) -> str:
        """Name of the metric in tables."""
        return f"evaluation {self.metric.removeprefix('eval_')}"

    def score(self, evaluated: Mapping[str, Any]) -> float:
        """Return a number that is smaller for a better model, or WORST without a finite value of the metric."""
        value = evaluated.get(self.metric, math.nan)
        if not math.isfinite(value):
            return WORST
        return -value if self.mode == "max" else value

    def describe(self, score: float) -> str:
        """Return the name and the value of the metric, given a score."""
        return f"{self.title} {-score if self.mode == 'max' else score:.4f}"

    def best(self, evaluations: Iterable[Evaluated]) -> Evaluated | None:
        """Return the best evaluation, the first one of equals, or None if none has a finite value."""
        return min((one for one in evaluations if self.score(one) < WORST), key=self.score, default=None)


class Best(BaseModel):
    """The best regular checkpoint of a run so far, the first one of equals."""

    step: int = 0
    """Its step. 0: there is none with a finite value."""
    score: float = WORST
    since: int = 0
    """Number of regular checkpoints since then. None of them is better."""

    def after(self, step: int, score: float) -> Self:
        """Return the best checkpoint after another regular one."""
        if score < self.score:
            return type(self)(step=step, score=score)
        return self.model_copy(update={"since": self.since + 1})

    def rank(self, score: float) -> float:
        """Return the score by which to keep a new checkpoint: of equals, the first one is kept."""
        return math.nextafter(score, math.inf) if score == self.score < WORST else score
