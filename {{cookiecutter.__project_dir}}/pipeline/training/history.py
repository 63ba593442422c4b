"""What a run left in its folder, read back: its steps, its starts, and what they add up to."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.training import storage
from settings import UserError

FILES = ("run.json", "events.jsonl", "metrics.jsonl")
"""What says that a folder is a run: what it is, and what MetricLogger wrote of it."""

Line = dict[str, Any]
"""Of metrics.jsonl or events.jsonl: it has a step, and the time after it in Unix seconds."""


@dataclass(frozen=True)
class Start:
    """The workers of a run from one start to the next."""

    began: Line
    """The event, which says what they are."""
    last: Line
    """The last that was seen of them."""

    @property
    def seconds(self) -> float:
        return self.last["time"] - self.began["time"]


@dataclass(frozen=True)
class History:
    """One run."""

    name: str
    identity: dict[str, Any]
    """What preflight.py wrote into run.json."""
    events: list[Line]
    rows: list[Line]
    """One a step, without those that a restart computed again."""
    data: dict[str, Any] | None = None
    """The manifest of the packed rows that the run was trained on."""

    @cached_property
    def starts(self) -> list[Start]:
        groups: list[list[Line]] = []
        for event in self.events:
            if event["event"] == "start":
                groups.append([])
            groups[-1].append(event)
        return [Start(group[0], last_seen(group, self.rows if group is groups[-1] else [])) for group in groups]

    @property
    def seconds(self) -> float:
        """Time in which there were workers."""
        return sum(start.seconds for start in self.starts)

    @property
    def restarts(self) -> list[int]:
        """The steps after which the workers were started again."""
        return [start.began["step"] for start in self.starts[1:]]

    @property
    def checkpoints(self) -> list[int]:
        """The steps that were saved."""
        return sorted({event["step"] for event in self.events if event["event"] == "checkpoint"})

    @property
    def steps_lost(self) -> int:
        """Steps that were seen, lost by a restart, and computed again or yet to be."""
        pairs = zip(self.starts, self.restarts, strict=False)
        return sum(max(0, start.last["step"] - resumed) for start, resumed in pairs)


def read_all(output: str, names: Sequence[str]) -> list[History]:
    """The runs of these names, or all, in the folder or URI `output`.

    Raises:
        UserError: there is none, or not one of that name.
    """
    try:
        found = {name: read(output, name) for name in names or storage.list_names(output)}
        runs = [run for run in found.values() if run]
        if unknown := [name for name in names if not found[name]]:
            there = [name for name in storage.list_names(output) if read(output, name)]
            raise UserError(
                f"{output} has no run {unknown[0]!r} with a step in it; it has: {', '.join(there) or 'none'}."
            )
    except OSError as error:
        raise UserError(f"the runs in {output} cannot be read ({error}); correct output in [train].") from None
    if not runs:
        raise UserError(f"{output} has no run with a step in it yet; make one with: inv submit finetune_ddp")
    return runs


def read(output: str, name: str) -> History | None:
    """A run in `output`; None where no step of it is there."""
    identity, events, rows = (storage.read_text(f"{output}/{name}/{file}") for file in FILES)
    if not (identity and events and rows):
        return None
    data = storage.read_text(f"{output}/{name}/data.json")
    return History(
        name, json.loads(identity), list(lines(events)), list(lines(rows)), json.loads(data) if data else None
    )


def lines(text: str) -> Iterator[Line]:
    """The objects of a file that was written line by line; a kill may have cut the last one short."""
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def last_seen(events: list[Line], rows: list[Line]) -> Line:
    """The latest that is known of a run."""
    return max((*events[-1:], *rows[-1:]), key=lambda line: line["time"])
