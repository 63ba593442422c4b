"""The served models, the canary's share of requests, and the metrics of each app.

One small actor per cluster keeps this state. Replicas report the outcomes of their requests to it, and get the routes
for forwarding requests. The actor asks Serve which apps exist, because an app that is scaled to zero has no replica to
report it. State that must outlive the actor is in the cluster's key-value store.
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

from raymill.ray_support.private import core
from raymill.ray_support.private import serve as private_serve
from raymill.serving.options import CANARY, ROOT, app_name

NAME, NAMESPACE = "routing", "serve_llm"
REPORT_INTERVAL_S = 2.0
MAX_LATENCIES = 10_000
"""The latencies of an app are computed from at most this many of its latest requests."""

log = logging.getLogger("ray.serve")


class RequestOutcome(NamedTuple):
    """The outcome of a request."""

    status: int
    first_s: float
    """Seconds until the first part of the answer."""
    total_s: float
    """Seconds until the end of the answer."""


class Routes(NamedTuple):
    """The apps to which the app at the root path forwards requests."""

    others: dict[str, str]
    """Maps the name of each other model to the path of its app."""
    canary: str | None
    """Path of the canary, or None if the canary gets no requests."""
    percent: float
    """The canary's share of the requests for the main model, in percent."""


NO_ROUTES = Routes({}, None, 0.0)


@dataclass
class AppMetrics:
    """The models of one application, and the outcomes of its requests, as its replicas report them."""

    models: list[str] = field(default_factory=list)
    """Names that clients may request: first the model's own name, then the names of its adapters."""
    requests: int = 0
    errors: int = 0
    """Requests that ended with status 500 or above."""
    outcomes: deque[RequestOutcome] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))

    def add(self, outcomes: list[RequestOutcome]) -> None:
        """Count finished requests."""
        self.requests += len(outcomes)
        self.errors += sum(outcome.status >= 500 for outcome in outcomes)
        self.outcomes.extend(outcomes)

    def reset(self) -> None:
        """Start counting from zero."""
        self.requests = self.errors = 0
        self.outcomes.clear()

    def summary(self) -> dict[str, float]:
        """Return the counts, and the percentiles of the latencies in milliseconds."""
        answered = [outcome for outcome in self.outcomes if outcome.status < 400]
        numbers: dict[str, float] = {"requests": self.requests, "errors": self.errors}
        if len(answered) > 1:
            for name in ("first", "total"):
                seconds = [getattr(outcome, f"{name}_s") for outcome in answered]
                cuts = statistics.quantiles(seconds, n=100, method="inclusive")
                numbers |= {f"{name}_p50_ms": 1000 * cuts[49], f"{name}_p95_ms": 1000 * cuts[94]}
        return numbers


def running_apps() -> set[str]:
    """Return the names of Serve's applications, except those being deleted."""
    private_serve.forget_dead_client()
    apps = serve.status().applications
    return {name for name, app in apps.items() if app.status != ApplicationStatus.DELETING}


class StateStore:
    """A value in the cluster's key-value store. It lasts as long as the head node."""

    def load(self) -> Any:
        """Return the last saved value, or None."""
        found = core.get_value(NAME, NAMESPACE)
        return found and json.loads(found)

    def save(self, value: Any) -> None:
        """Save a JSON-serializable value."""
        core.put_value(NAME, json.dumps(value), NAMESPACE)


class RoutingState:
    """The routes, the canary and the metrics. `actor` runs this class as a Ray actor."""

    def __init__(self, running: Callable[[], set[str]] = running_apps, store: Any = None) -> None:
        """`running` returns the names of the applications that exist; `store` saves what must outlive the actor."""
        self._running = running
        self._checked_at = -REPORT_INTERVAL_S
        self._store = store or StateStore()
        self._saved = self._store.load() or {"models": {}, "canary": {}, "percent": 0.0}
        self._apps = {path: AppMetrics(models) for path, models in self._saved["models"].items()}
        self._canary: dict[str, Any] = self._saved["canary"]
        self._percent: float = self._saved["percent"]

    def report(self, path: str, models: list[str], outcomes: list[RequestOutcome]) -> Routes:
        """Add the outcomes that a replica of the app at `path` reports, and return the current routes."""
        is_new = path not in self._apps
        app = self._apps.setdefault(path, AppMetrics())
        app.models = models
        app.add(outcomes)
        if is_new or time.monotonic() - self._checked_at >= REPORT_INTERVAL_S:
            self._drop_deleted()
        self._save()
        return self._routes()

    def set_canary(self, percent: float, options: dict[str, Any] | None = None) -> None:
        """Give the canary this percentage of requests. With `options`, also replace the canary and reset all metrics.

        `options` contains the `ServeOptions` of the new canary. An empty dict removes the canary.
        """
        self._percent = percent
        if options is not None:
            self._canary = options
            for app in self._apps.values():
                app.reset()
        self._save()

    def canary(self) -> dict[str, Any]:
        """Return the `ServeOptions` of the canary, or an empty dict if there is none."""
        self._drop_deleted()
        return self._canary

    def apps(self) -> dict[str, dict[str, Any]]:
        """Return the models, the share of requests and the metrics of each app, keyed by path."""
        self._drop_deleted()
        self._save()
        shares = {ROOT: 100 - self._percent, CANARY: self._percent}
        return {
            path: {"models": app.models, "percent": shares.get(path, 100), **app.summary()}
            for path, app in self._apps.items()
        }

    def _drop_deleted(self) -> None:
        running = self._running()
        self._checked_at = time.monotonic()
        self._apps = {path: app for path, app in self._apps.items() if app_name(path) in running}
        if app_name(CANARY) not in running:
            self._canary, self._percent = {}, 0.0

    def _save(self) -> None:
        """Save the state that must outlive the actor, if it changed.

        An app that is scaled to zero has no replica to report its models to a restarted actor.
        """
        models = {path: app.models for path, app in self._apps.items()}
        state = {"models": models, "canary": self._canary, "percent": self._percent}
        if state != self._saved:
            self._store.save(state)
            self._saved = state

    def _routes(self) -> Routes:
        added = {path: app for path, app in self._apps.items() if path not in (ROOT, CANARY)}
        main, canary = (self._apps[path].models if path in self._apps else [] for path in (ROOT, CANARY))
        # a run's adapter can have the name of the main model, which then answers
        others = {model: path for path, app in added.items() for model in app.models if model not in main}
        is_canary_of_main = bool(canary) and (not main or canary[0] == main[0])
        return Routes(others, CANARY if is_canary_of_main and self._percent else None, self._percent)


def actor() -> Any:
    """Return the cluster's routing actor, and start it if necessary. The actor outlives the job that starts it."""
    lifetime = {"lifetime": "detached", "get_if_exists": True, "max_restarts": -1}
    return ray.remote(RoutingState).options(num_cpus=0, name=NAME, namespace=NAMESPACE, **lifetime).remote()


class Reporter:
    """A replica's connection to the routing actor. Reports outcomes, and receives the routes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.routes = NO_ROUTES
        self._actor = actor()
        self._outcomes: list[RequestOutcome] = []

    def record(self, outcome: RequestOutcome) -> None:
        """Add an outcome to the next report."""
        self._outcomes.append(outcome)

    async def report_forever(self, models: Callable[[], list[str]]) -> None:
        """Report every REPORT_INTERVAL_S seconds. `models` returns the names that clients may request from this app."""
        while True:
            outcomes, self._outcomes = self._outcomes, []
            try:
                self.routes = await self._actor.report.remote(self.path, models(), outcomes)
            except Exception as error:  # for example while the actor restarts
                log.warning(
                    f"could not report the outcomes of {len(outcomes)} requests ({type(error).__name__}); "
                    "the routes stay the same"
                )
            await asyncio.sleep(REPORT_INTERVAL_S)
