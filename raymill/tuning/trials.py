"""Stores the trials of a search in its folder, and shows them as a table and a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from matplotlib.figure import Figure
from rich.table import Table

from raymill import state_files
from raymill.training import history, storage
from raymill.training.history import Line
from raymill.training.ranking import WORST, Ranking
from raymill.training.storage import RunFolder

FILE, PLOT = "trials.json", "trials.png"
WEIGHTS = ("step-", "model", "adapter")
"""Prefixes of the folders that hold a run's weights."""


@dataclass
class Trial:
    """Settings to try, and how the training run with these settings ended."""

    name: str
    settings: dict[str, float]
    ended: str = ""
    """How the trial ended; empty if it has not ended."""

    def description(self) -> str:
        """Return the trial's settings on one line."""
        return ", ".join(f"{key} {value:g}" for key, value in self.settings.items())


class Outcome(NamedTuple):
    """The result of a trial so far."""

    trial: Trial
    curve: list[Line]
    """The trial's evaluations, by step."""
    ranking: Ranking = Ranking()
    """Which evaluation is the best."""

    @property
    def steps(self) -> int:
        return self.curve[-1]["step"] if self.curve else 0

    @property
    def best(self) -> str:
        """The best value of the metric that ranks trials."""
        best = self.ranking.best(self.curve)
        return f"{best[self.ranking.metric]:.4f}" if best else "-"

    @property
    def score(self) -> float:
        """A number that is smaller for a better trial. WORST if there is no evaluation."""
        return min(map(self.ranking.score, self.curve), default=WORST)


def load(folder: str, drawn: Sequence[dict[str, float]]) -> list[Trial]:
    """Return the trials of the search in `folder`, with `Trial.ended` as last saved.

    Raises:
        UserError: the file with the trials is damaged.
    """
    text = storage.read_text(f"{folder}/{FILE}")
    remedy = "Delete this file to run the trials again; each resumes from its last checkpoint."
    trials = [] if text is None else state_files.parse_or_refuse(text, list[Trial], f"{folder}/{FILE}", remedy)
    saved = {trial.name: trial.ended for trial in trials}
    names = [f"trial-{number:02d}" for number in range(1, len(drawn) + 1)]
    return [Trial(name, values, saved.get(name, "")) for name, values in zip(names, drawn, strict=True)]


def save(folder: str, trials: Sequence[Trial]) -> None:
    """Save the trials."""
    storage.write_text(f"{folder}/{FILE}", json.dumps([asdict(trial) for trial in trials], indent=2) + "\n")


def outcome(folder: str, trial: Trial) -> Outcome:
    """Return the result of a trial so far, without evaluations in which the metric that ranks trials is not finite."""
    logged, events = (
        list(history.lines(storage.read_text(f"{folder}/{trial.name}/{file}") or ""))
        for file in ("metrics.jsonl", "events.jsonl")
    )
    ranking = history.ranking(events)
    return Outcome(trial, [line for line in logged if line["step"] and ranking.score(line) < WORST], ranking)


def ranked(folder: str, trials: Sequence[Trial]) -> list[Outcome]:
    """Return the results of the trials, best first."""
    return sorted((outcome(folder, trial) for trial in trials), key=lambda outcome: outcome.score)


def delete_weights(folder: str, trials: Sequence[Trial]) -> None:
    """Delete the checkpoints and models of trials that have ended."""
    for trial in trials:
        location = f"{folder}/{trial.name}"
        for name in storage.list_names(location) if trial.ended else []:
            if name.startswith(WEIGHTS):
                storage.delete_folder(f"{location}/{name}")


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with the settings, steps and best evaluation of each trial, and how it ended."""
    keys = list(outcomes[0].trial.settings)
    shown = Table(box=None)
    shown.add_column("trial")
    for column in (*keys, "steps", outcomes[0].ranking.title):
        shown.add_column(column, justify="right")
    shown.add_column("ended")
    for outcome in outcomes:
        trial = outcome.trial
        numbers = [f"{trial.settings[key]:g}" for key in keys] + [f"{outcome.steps}", outcome.best]
        shown.add_row(trial.name, *numbers, trial.ended or "not yet")
    return shown


def plot(folder: str, outcomes: Sequence[Outcome]) -> str:
    """Plot the evaluations of each trial against the step. The best trial has a thick line. Return the path."""
    ranking = outcomes[0].ranking
    figure = Figure(figsize=(9, 5))
    axes = figure.subplots()
    for outcome in outcomes:
        steps, values = ([line[key] for line in outcome.curve] for key in ("step", ranking.metric))
        width = 3 if outcome is outcomes[0] else 1
        axes.plot(steps, values, "o-", linewidth=width, markersize=3, label=outcome.trial.description())
    axes.set(xlabel="step", ylabel=ranking.title, yscale="log" if ranking == Ranking() else "linear")
    axes.legend(fontsize="x-small")
    run_folder = RunFolder(folder)
    figure.savefig(run_folder.path / PLOT, dpi=120, bbox_inches="tight")
    run_folder.publish()
    return f"{folder}/{PLOT}"


def snippet(trial: Trial, profile: str) -> str:
    """Return the settings of a trial as lines for settings.toml."""
    return "\n".join([f"[{profile}.train]", *(f"{key} = {value}" for key, value in trial.settings.items())])
