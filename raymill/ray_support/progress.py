"""Prints the progress of work on many nodes: amount done, speed and time left."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import ray
from ray.actor import ActorHandle

PROGRESS_INTERVAL_S = 5.0


class _Totals:
    """An actor that sums up what the tasks report."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()

    def add(self, amounts: dict[str, int]) -> None:
        self.totals.update(amounts)

    def read(self) -> dict[str, int]:
        return dict(self.totals)


def _report(totals: ActorHandle, **amounts: int) -> None:
    totals.add.remote(amounts)


class Progress:
    """A context manager that prints `describe(totals, seconds)` every few seconds.

    Pass `report` to the tasks. They add to the totals with `report(name=amount, …)`. Retried tasks report again, so the
    totals are approximate.
    """

    def __init__(self, describe: Callable[[dict[str, int], float], str]) -> None:
        self._describe = describe
        self._totals = ray.remote(num_cpus=0)(_Totals).remote()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._print_until_done, daemon=True)
        self.report: Callable[..., Any] = partial(_report, self._totals)

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _print_until_done(self) -> None:
        while not self._done.wait(PROGRESS_INTERVAL_S):
            print(self._describe(ray.get(self._totals.read.remote()), time.monotonic() - self._start), flush=True)


def time_left(done: float, total: float, seconds: float) -> str:
    """Format the time left, at the average speed so far."""
    if not done:
        return "time left unknown"
    left = max(0.0, total / done - 1) * seconds
    return f"{left / 60:.0f} min left" if left >= 120 else f"{left:.0f} s left"
