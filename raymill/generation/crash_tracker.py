"""Finds the rows that crash an engine. If a row was in flight at two crashes, the run stops."""

import shlex
from collections import Counter, defaultdict

MAX_STARTS = 2  # how often an engine may start before it answers a row


class CrashTracker:
    """Tracks the rows in flight in each engine. It runs as one actor for all engines of a run."""

    def __init__(self) -> None:
        self._starts: Counter[str] = Counter()  # how often each engine has started since it last answered a row
        self._in_flight: defaultdict[str, set[str]] = defaultdict(set)
        self._suspects: set[str] = set()  # in flight at one crash
        self._culprits: set[str] = set()  # in flight at two crashes

    def start(self, engine: str) -> frozenset[str]:
        """Record the start of an engine, and return all suspects, including the rows in flight when it last died."""
        self._starts[engine] += 1
        lost = self._in_flight.pop(engine, set())
        self._culprits |= lost & self._suspects
        self._suspects |= lost
        return frozenset(self._suspects)

    def begin(self, engine: str, ids: list[str]) -> None:
        """Record rows that the engine starts to work on."""
        self._in_flight[engine].update(ids)

    def end(self, engine: str, ids: list[str]) -> None:
        """Record rows that the engine has answered."""
        self._in_flight[engine].difference_update(ids)
        self._starts[engine] = 0

    def is_crash_looping(self, engine: str) -> bool:
        """Return whether the engine has died too often without an answer, for example while it loaded the model."""
        return self._starts[engine] > MAX_STARTS

    def culprits(self) -> list[str]:
        """Return the rows that were in flight at two crashes."""
        return sorted(self._culprits)


def error_message(culprits: list[str]) -> str:
    """Return the error message that names these rows."""
    return (
        "an engine crashed twice with the same rows in flight, so the run stopped; finished answers are kept. "
        f"To answer the remaining rows, run the same command with: --skip-ids {shlex.join(culprits)}"
    )
