"""Which rows are in an engine when it dies; a row that is there twice is not tried a third time."""

import shlex
from collections import defaultdict


class Suspects:
    """Knows each engine's rows. One such actor serves all engines of a run."""

    def __init__(self) -> None:
        self._in_flight: defaultdict[str, set[str]] = defaultdict(set)
        self._suspects: set[str] = set()
        self._convicted: set[str] = set()

    def start(self, engine: str) -> frozenset[str]:
        """Return the suspects to an engine that starts. The rows that it held before, when it died, are among them."""
        lost = self._in_flight.pop(engine, set())
        self._convicted |= lost & self._suspects
        self._suspects |= lost
        return frozenset(self._suspects)

    def begin(self, engine: str, ids: list[str]) -> None:
        """Note rows that the engine is about to get."""
        self._in_flight[engine].update(ids)

    def end(self, engine: str, ids: list[str]) -> None:
        """Note rows that it has answered."""
        self._in_flight[engine].difference_update(ids)

    def convicted(self) -> list[str]:
        """Return the rows that were in an engine at two deaths."""
        return sorted(self._convicted)


def sentence(convicted: list[str]) -> str:
    """Return what to tell a person."""
    return (
        "an engine died twice with the same rows in flight and is not started again; what was answered is kept. "
        f"To answer the rest, run this again with: --skip-ids {shlex.join(convicted)}"
    )
