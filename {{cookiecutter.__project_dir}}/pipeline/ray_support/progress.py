"""Prints how far work on many nodes is: what, how far, how fast, how long still."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import ray
from ray.actor import ActorHandle

INTERVAL_S = 5.0


class _Totals:
    """Sums up what the tasks report."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()

    def add(self, amounts: dict[str, int]) -> None:
        self.totals.update(amounts)

    def read(self) -> dict[str, int]:
        return dict(self.totals)


def _report(totals: ActorHandle, **amounts: int) -> None:
    totals.add.remote(amounts)


class Progress:
    """While it is entered, prints the line that `describe(totals, seconds)` makes every few seconds.

    Tasks add to the totals with `report(name=amount, …)`, which can be sent to them. A task that is run again
    reports again: the totals are for the eye.
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
        while not self._done.wait(INTERVAL_S):
            print(self._describe(ray.get(self._totals.read.remote()), time.monotonic() - self._start), flush=True)


def time_left(done: float, total: float, seconds: float) -> str:
    """How long the rest takes at the speed so far, in words."""
    if not done:
        return "time left unknown"
    left = max(0.0, total / done - 1) * seconds
    return f"{left / 60:.0f} min left" if left >= 120 else f"{left:.0f} s left"
