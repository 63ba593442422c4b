"""Which models stand behind one address, what share of the requests a canary gets, and how each of them fares.

One small actor of the cluster knows it. Replicas tell it what became of their requests, and learn from its answer
whom to hand requests on to.
"""

import asyncio
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray

from jobs.serving.options import CANARY, ROOT

NAME, NAMESPACE = "traffic", "serve_llm"
TELL_EVERY_S = 2.0
GONE_AFTER_S = 10.0
"""An app none of whose replicas has told anything for so long is no longer there."""
KEPT = 10_000
"""Requests of an app whose times are remembered."""

log = logging.getLogger("ray.serve")


class Record(NamedTuple):
    """What became of a request."""

    status: int
    first_s: float
    """Seconds until the answer began."""
    whole_s: float
    """Seconds until it had ended."""


class Routes(NamedTuple):
    """Whom the app at the address hands requests on to."""

    others: dict[str, str]
    """Path of the app that serves a model, by each name that a client may ask for."""
    canary: str | None
    """Path of the app that gets a share of the requests for the address's own model."""
    percent: float
    """That share."""


NOWHERE = Routes({}, None, 0.0)


@dataclass
class App:
    """One application, as its replicas tell of it."""

    models: list[str] = field(default_factory=list)
    """Names that a client may ask it for; the first is the model's own."""
    told_at: float = 0.0
    requests: int = 0
    errors: int = 0
    """Those that the server is to blame for: status 500 and above."""
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=KEPT))


class Traffic:
    """The actor's state."""

    def __init__(self) -> None:
        self._apps: dict[str, App] = {}
        self._canary: dict[str, Any] = {}
        self._percent = 0.0

    def tell(self, path: str, models: list[str], records: list[Record]) -> Routes:
        """A replica of the app at `path`, which answers for `models`, tells what became of its last requests."""
        app = self._apps.setdefault(path, App())
        app.models, app.told_at = models, time.monotonic()
        app.requests += len(records)
        app.errors += sum(record.status >= 500 for record in records)
        app.records.extend(records)
        return self._routes()

    def _routes(self) -> Routes:
        oldest = time.monotonic() - GONE_AFTER_S
        self._apps = {path: app for path, app in self._apps.items() if app.told_at > oldest}
        beside = {path: app for path, app in self._apps.items() if path not in (ROOT, CANARY)}
        others = {model: path for path, app in beside.items() for model in app.models}
        canary = CANARY if CANARY in self._apps and self._percent else None
        return Routes(others, canary, self._percent)

    def give_canary(self, percent: float, options: dict[str, Any] | None = None) -> None:
        """Give the canary that share; with `options`, those of its `serve_llm`, it is a new one, and counts anew."""
        self._percent = percent
        if options is not None:
            self._canary = options
            for app in self._apps.values():
                app.requests, app.errors = 0, 0
                app.records.clear()

    def canary(self) -> dict[str, Any]:
        """The options of the canary's `serve_llm`; empty when there is none."""
        return self._canary

    def apps(self) -> dict[str, dict[str, Any]]:
        """What is served, by path, and how it fared since the last canary began."""
        self._routes()
        shares = {ROOT: 100 - self._percent, CANARY: self._percent}
        return {
            path: {"models": app.models, "percent": shares.get(path, 100), **_numbers(app)}
            for path, app in self._apps.items()
        }


def _numbers(app: App) -> dict[str, float]:
    answered = [record for record in app.records if record.status < 400]
    times = {"first": [record.first_s for record in answered], "whole": [record.whole_s for record in answered]}
    numbers: dict[str, float] = {"requests": app.requests, "errors": app.errors}
    for name, seconds in times.items():
        if len(seconds) > 1:
            cuts = statistics.quantiles(seconds, n=100, method="inclusive")
            numbers |= {f"{name}_p50_ms": 1000 * cuts[49], f"{name}_p95_ms": 1000 * cuts[94]}
    return numbers


def actor() -> Any:
    """The cluster's one; it is started when there is none, and ends with the cluster."""
    kept = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1}
    return ray.remote(Traffic).options(num_cpus=0, **kept).remote()


class Reporter:
    """A replica's end: gathers records, and learns the routes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.routes = NOWHERE
        self._actor = actor()
        self._records: list[Record] = []

    def note(self, record: Record) -> None:
        """Remember a request that is over, until the actor is told."""
        self._records.append(record)

    async def keep_up(self, models: Callable[[], list[str]]) -> None:
        """Tell the actor again and again; `models` gives the names that a client may ask this app for."""
        while True:
            told, self._records = self._records, []
            try:
                self.routes = await self._actor.tell.remote(self.path, models(), told)
            except Exception as error:  # the actor starts anew, say: the last routes stay
                log.warning(f"traffic was not told ({type(error).__name__}); the last routes stay")
            await asyncio.sleep(TELL_EVERY_S)
