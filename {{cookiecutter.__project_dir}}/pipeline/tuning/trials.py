"""The trials of a search: as its folder holds them, and as they are shown at the end."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from matplotlib.figure import Figure
from rich.table import Table

from pipeline.training import storage
from pipeline.training.history import Line, lines
from pipeline.training.storage import RunFolder

FILE, PLOT = "trials.json", "trials.png"
WEIGHTS = ("step-", "model", "adapter")
"""How the names of folders begin that hold a run's weights."""


@dataclass
class Trial:
    """Settings that were drawn, and the run that tries them."""

    name: str
    settings: dict[str, float]
    ended: str = ""
    """How it ended; empty where it has not."""

    def described(self) -> str:
        """Its settings, in a line."""
        return ", ".join(f"{key} {value:g}" for key, value in self.settings.items())


class Outcome(NamedTuple):
    """How far a trial came."""

    trial: Trial
    curve: list[Line]
    """Its evaluations, by step."""

    @property
    def steps(self) -> int:
        return self.curve[-1]["step"] if self.curve else 0

    @property
    def loss(self) -> float:
        """The lowest, in nats a token; infinite without an evaluation."""
        return min((line["eval_loss"] for line in self.curve), default=math.inf)


def load(folder: str, drawn: Sequence[dict[str, float]]) -> list[Trial]:
    """The trials of the search in `folder`, with what an earlier start of it has noted."""
    noted = {one["name"]: one["ended"] for one in json.loads(storage.read_text(f"{folder}/{FILE}") or "[]")}
    names = [f"trial-{number:02d}" for number in range(1, len(drawn) + 1)]
    return [Trial(name, values, noted.get(name, "")) for name, values in zip(names, drawn, strict=True)]


def save(folder: str, trials: Sequence[Trial]) -> None:
    """Note what is known of the trials."""
    storage.write_text(f"{folder}/{FILE}", json.dumps([asdict(trial) for trial in trials], indent=2) + "\n")


def curve(folder: str, name: str) -> list[Line]:
    """The evaluations of a trial so far."""
    text = storage.read_text(f"{folder}/{name}/metrics.jsonl") or ""
    return [line for line in lines(text) if math.isfinite(line.get("eval_loss", math.nan))]


def ranked(folder: str, trials: Sequence[Trial]) -> list[Outcome]:
    """The trials, best first."""
    return sorted((Outcome(trial, curve(folder, trial.name)) for trial in trials), key=lambda outcome: outcome.loss)


def delete_weights(folder: str, trials: Sequence[Trial]) -> None:
    """Delete the checkpoints and models of trials that have ended: those of each are larger than its model."""
    for trial in trials:
        location = f"{folder}/{trial.name}"
        for name in storage.list_names(location) if trial.ended else []:
            if name.startswith(WEIGHTS):
                storage.delete_folder(f"{location}/{name}")


def table(outcomes: Sequence[Outcome]) -> Table:
    """Settings, steps, lowest evaluation loss and end of each trial."""
    keys = list(outcomes[0].trial.settings)
    shown = Table(box=None)
    shown.add_column("trial")
    for column in (*keys, "steps", "evaluation loss"):
        shown.add_column(column, justify="right")
    shown.add_column("ended")
    for outcome in outcomes:
        trial = outcome.trial
        numbers = [f"{trial.settings[key]:g}" for key in keys] + [f"{outcome.steps}", f"{outcome.loss:.4f}"]
        shown.add_row(trial.name, *numbers, trial.ended or "not yet")
    return shown


def plot(folder: str, outcomes: Sequence[Outcome]) -> str:
    """Draw the evaluation loss of each trial by step, the best one bold; returns where."""
    figure = Figure(figsize=(9, 5))
    axes = figure.subplots()
    for outcome in outcomes:
        steps, losses = ([line[key] for line in outcome.curve] for key in ("step", "eval_loss"))
        width = 3 if outcome is outcomes[0] else 1
        axes.plot(steps, losses, "o-", linewidth=width, markersize=3, label=outcome.trial.described())
    axes.set(xlabel="step", ylabel="evaluation loss per token (nats)", yscale="log")
    axes.legend(fontsize="x-small")
    place = RunFolder(folder)
    figure.savefig(place.path / PLOT, dpi=120, bbox_inches="tight")
    place.publish()
    return f"{folder}/{PLOT}"


def snippet(trial: Trial, profile: str) -> str:
    """The settings of a trial as settings.toml wants them."""
    return "\n".join([f"[{profile}.train]", *(f"{key} = {value}" for key, value in trial.settings.items())])
