"""Which models stand behind one address, what share of the requests a canary gets, and how each of them fares.

One small actor per cluster keeps this state. Replicas report the outcome of their requests to it, and get the routes
for forwarding requests. It asks Serve which apps exist, because an app without replicas still exists: the next request
starts one. State that must outlive the actor is in the cluster's key-value store.
"""

import asyncio
import json
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from pipeline.ray_support.private import key_value
from pipeline.ray_support.private import serve as private_serve
from pipeline.serving.options import CANARY, ROOT, app_name

NAME, NAMESPACE = "traffic", "serve_llm"
REPORT_INTERVAL_S = 2.0
KEPT = 10_000
"""Requests of an app whose times are remembered."""

log = logging.getLogger("ray.serve")


class RequestOutcome(NamedTuple):
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
    requests: int = 0
    errors: int = 0
    """Those that the server is to blame for: status 500 and above."""
    records: deque[RequestOutcome] = field(default_factory=lambda: deque(maxlen=KEPT))


def running_apps() -> set[str]:
    """Return the names of Serve's applications, except those being deleted."""
    private_serve.forget_dead_client()
    apps = serve.status().applications
    return {name for name, app in apps.items() if app.status != ApplicationStatus.DELETING}


class Store:
    """A value in the cluster's key-value store, which lasts as long as the head."""

    def load(self) -> Any:
        """Return the value saved last, or None."""
        found = key_value.get(NAME, NAMESPACE)
        return found and json.loads(found)

    def save(self, value: Any) -> None:
        """Save a JSON-serializable value."""
        key_value.put(NAME, json.dumps(value), NAMESPACE)


class RoutingState:
    """The actor's state."""

    def __init__(self, running: Callable[[], set[str]] = running_apps, store: Any = None) -> None:
        self._running = running
        self._looked_at = -REPORT_INTERVAL_S
        self._store = store or Store()
        self._saved = self._store.load() or {"models": {}, "canary": {}, "percent": 0.0}
        self._apps = {path: App(models) for path, models in self._saved["models"].items()}
        self._canary: dict[str, Any] = self._saved["canary"]
        self._percent: float = self._saved["percent"]

    def report(self, path: str, models: list[str], records: list[RequestOutcome]) -> Routes:
        """A replica of the app at `path`, which answers for `models`, tells what became of its last requests."""
        is_new = path not in self._apps
        app = self._apps.setdefault(path, App())
        app.models = models
        app.requests += len(records)
        app.errors += sum(record.status >= 500 for record in records)
        app.records.extend(records)
        if is_new or time.monotonic() - self._looked_at >= REPORT_INTERVAL_S:
            self._forget_ended()
        self._save()
        return self._routes()

    def _forget_ended(self) -> None:
        running = self._running()
        self._looked_at = time.monotonic()
        self._apps = {path: app for path, app in self._apps.items() if app_name(path) in running}
        if app_name(CANARY) not in running:
            self._canary, self._percent = {}, 0.0

    def _save(self) -> None:
        """Save what must survive the actor: an app that is scaled to zero has no replica to report it again."""
        models = {path: app.models for path, app in self._apps.items()}
        state = {"models": models, "canary": self._canary, "percent": self._percent}
        if state != self._saved:
            self._store.save(state)
            self._saved = state

    def _routes(self) -> Routes:
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
        self._save()

    def canary(self) -> dict[str, Any]:
        """The options of the canary's `serve_llm`; empty when there is none."""
        self._forget_ended()
        return self._canary

    def apps(self) -> dict[str, dict[str, Any]]:
        """What is served, by path, and how it fared since the last canary began."""
        self._forget_ended()
        self._save()
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
    return ray.remote(RoutingState).options(num_cpus=0, **kept).remote()


class Reporter:
    """A replica's end: gathers records, and learns the routes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.routes = NOWHERE
        self._actor = actor()
        self._records: list[RequestOutcome] = []

    def note(self, record: RequestOutcome) -> None:
        """Remember a request that is over, until the actor is told."""
        self._records.append(record)

    async def keep_up(self, models: Callable[[], list[str]]) -> None:
        """Tell the actor again and again; `models` gives the names that a client may ask this app for."""
        while True:
            told, self._records = self._records, []
            try:
                self.routes = await self._actor.report.remote(self.path, models(), told)
            except Exception as error:  # the actor starts anew, say: the last routes stay
                log.warning(f"traffic was not told ({type(error).__name__}); the last routes stay")
            await asyncio.sleep(REPORT_INTERVAL_S)
