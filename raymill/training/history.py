"""Reads the metrics and events of a run from its folder."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile
from typing import Any

from raymill import state_files
from raymill.errors import UserError
from raymill.settings import inv
from raymill.training import storage
from raymill.training.ranking import Ranking

FILES = ("run.json", "events.jsonl", "metrics.jsonl")
"""Files that every run has. MetricLogger writes the last two."""

EXPORT = "export"
"""The event that says which step's model was exported. It may come long after the run has ended."""

Line = dict[str, Any]
"""A line of metrics.jsonl or events.jsonl. Each line has a `step`, and a `time` in Unix seconds."""


@dataclass(frozen=True)
class Attempt:
    """The part of a run between one start of its workers and the next."""

    start: Line
    """The `start` event, which describes the workers."""
    last: Line
    """The last line that was logged in this part."""

    @property
    def seconds(self) -> float:
        return self.last["time"] - self.start["time"]


@dataclass(frozen=True)
class History:
    """The metrics and events of one run."""

    name: str
    identity: dict[str, Any]
    """The content of run.json, which preflight.py wrote."""
    events: list[Line]
    rows: list[Line]
    """One line per step. If a restart repeated a step, only the repetition is in the list."""
    data: dict[str, Any] | None = None
    """The manifest of the run's packed rows. None: the run reads a stream."""
    start: Line | None = None
    """The evaluation before the first step, if there was one."""

    @cached_property
    def attempts(self) -> list[Attempt]:
        groups: list[list[Line]] = []
        for event in self.events:
            if event["event"] == "start":
                groups.append([])
            if event["event"] != EXPORT:
                groups[-1].append(event)
        return [Attempt(group[0], last_seen(group, self.rows if group is groups[-1] else [])) for group in groups]

    @property
    def evaluations(self) -> list[Line]:
        return [line for line in (*([self.start] if self.start else []), *self.rows) if "eval_loss" in line]

    @property
    def ranking(self) -> Ranking:
        return ranking(self.events)

    @property
    def export(self) -> Line | None:
        """The event of the last export. None: there was none, or an older version exported the model."""
        return next((event for event in reversed(self.events) if event["event"] == EXPORT), None)

    @property
    def stopped_early(self) -> bool:
        """Whether the run stopped early and was not continued with a larger `patience`."""
        last = next(event for event in reversed(self.events) if event["event"] in ("start", EXPORT))
        return last.get("stopped_early", False)

    @property
    def seconds(self) -> float:
        """Total time during which workers ran, in seconds."""
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def restarts(self) -> list[int]:
        """The step of the checkpoint from which each restart resumed. 0: there was no checkpoint."""
        return [attempt.start["step"] for attempt in self.attempts[1:]]

    @property
    def checkpoints(self) -> list[int]:
        """The steps after which the run saved a checkpoint."""
        return sorted({event["step"] for event in self.events if event["event"] == "checkpoint"})

    @property
    def steps_lost(self) -> int:
        """Number of steps that restarts had to repeat."""
        pairs = zip(self.attempts, self.restarts, strict=False)
        return sum(max(0, attempt.last["step"] - resumed) for attempt, resumed in pairs)


def read_all(output: str, names: Sequence[str]) -> list[History]:
    """Return the runs with these names in the folder or URI `output`, or all its runs if `names` is empty.

    Raises:
        UserError: there are no runs, one of the names does not exist, or `output` cannot be read.
    """
    try:
        found = {name: read(output, name) for name in names or storage.list_names(output)}
        runs = [run for run in found.values() if run]
        if unknown := [name for name in names if not found[name]]:
            existing = [name for name in storage.list_names(output) if read(output, name)]
            raise UserError(
                f"{output} has no run {unknown[0]!r} with logged steps; it has: {', '.join(existing) or 'none'}."
            )
    except OSError as error:
        raise UserError(f"cannot read the runs in {output} ({error}). Correct output in [train].") from None
    if not runs:
        raise UserError(f"no runs with logged steps in {output}. Start one: {inv('submit finetune_ddp')}")
    return runs


def read(output: str, name: str) -> History | None:
    """Return a run in `output`, or None if it has no steps yet.

    Raises:
        UserError: a file of the run is damaged.
    """
    identity, *logs = (storage.read_text(f"{output}/{name}/{file}") for file in FILES)
    events, logged = (list(lines(log or "")) for log in logs)
    rows = [line for line in logged if line["step"]]
    events = list(dropwhile(lambda event: event["event"] != "start", events))  # the first lines may be damaged
    if identity is None or not (events and rows):
        return None
    data = storage.read_text(f"{output}/{name}/data.json")
    return History(
        name,
        _parse(identity, f"{output}/{name}/run.json"),
        events,
        rows,
        None if data is None else _parse(data, f"{output}/{name}/data.json"),
        next((line for line in logged if not line["step"]), None),
    )


def _parse(text: str, location: str) -> dict[str, Any]:
    return state_files.parse_or_refuse(text, dict[str, Any], location, "Delete that file, then resume the run.")


def lines(text: str) -> Iterator[Line]:
    """Yield the objects of a JSON Lines file. Skip invalid lines, such as a last line that a kill cut off."""
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def ranking(events: Sequence[Line]) -> Ranking:
    """Return how a run with these events ranks models. Runs of an older version ranked by the evaluation loss."""
    start = next((event for event in reversed(events) if event["event"] == "start"), {})
    logged: dict[str, Any] = {name: start[f"best_{name}"] for name in Ranking._fields if f"best_{name}" in start}
    return Ranking(**logged)


def last_seen(events: list[Line], rows: list[Line]) -> Line:
    """Return the later of the last event and the last row."""
    return max((*events[-1:], *rows[-1:]), key=lambda line: line["time"])
