"""Lists the served models, changes a canary's share, promotes or rolls back a canary, and stops other models."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import serve
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raymill.errors import UserError
from raymill.printable import printable
from raymill.serving import deploy, drain, routing_state
from raymill.serving.hooks import Hooks
from raymill.serving.options import CANARY, RAG_APP, ROOT, ServeOptions, app_name
from raymill.settings import inv

LATENCIES = ("first_p50_ms", "first_p95_ms", "total_p50_ms", "total_p95_ms")


def set_canary_percent(percent: float) -> None:
    """Change the canary's share of requests."""
    _canary_options()
    ray.get(routing_state.actor().set_canary.remote(percent))
    print(f"the canary gets {percent:g} % of the requests", flush=True)


def promote(drain_s: float | None) -> None:
    """Replace the main model with the canary.

    The canary's running answers get `drain_s` seconds. None: as long as a request may take.
    """
    options = _canary_options()
    deploy.deploy_model(options.model_copy(update={"canary_percent": 0}), Hooks.of_job())
    _stop_canary(options.limits.shutdown_s if drain_s is None else drain_s)
    print(f"{options.model} is now the main model", flush=True)


def roll_back(drain_s: float) -> None:
    """Stop the canary. Its running answers get `drain_s` seconds."""
    _canary_options()
    _stop_canary(drain_s)


def end(name: str, drain_s: float) -> None:
    """Stop an additional model, or the application of `serve_rag`. Its running answers get `drain_s` seconds.

    Raises:
        UserError: there is no additional model or application of this name.
    """
    state = routing_state.actor()
    apps = ray.get(state.apps.remote())
    others = [path for path in apps if path not in (ROOT, CANARY)]
    app_names = {apps[path]["models"][0]: app_name(path) for path in others}
    if RAG_APP in serve.status().applications:
        app_names[RAG_APP] = RAG_APP
    if name not in app_names:
        found = ", ".join(app_names) or "none"
        raise UserError(f"no additional model is named {name} (found: {found}). List the models: {inv('models')}")
    drain.stop(app_names[name], name, drain_s)
    ray.get(state.apps.remote())  # makes the actor drop the app at once
    print(f"{name} is stopped", flush=True)


def end_all(drain_s: float) -> None:
    """Stop all applications at the same time. Their running answers get `drain_s` seconds."""
    apps = list(serve.status().applications)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda app: drain.stop(app, app, drain_s), apps))
    print(f"stopped: {', '.join(apps)}" if apps else "nothing is served", flush=True)


def show() -> None:
    """Print the models with their metrics since a canary was last started or removed."""
    apps: dict[str, dict[str, Any]] = ray.get(routing_state.actor().apps.remote())
    table = Table(box=None, pad_edge=False)
    for column in ("model", "path", "share %", "requests", "errors", *(name.replace("_", " ") for name in LATENCIES)):
        table.add_column(column, header_style="dim", justify="left" if column in ("model", "path") else "right")
    for path, app in sorted(apps.items()):
        latencies = (f"{app[name]:.0f}" if name in app else "" for name in LATENCIES)
        names = escape(printable(", ".join(app["models"])))
        table.add_row(names, path, f"{app['percent']:g}", f"{app['requests']}", f"{app['errors']}", *latencies)
    Console(width=120).print(table if apps else f"no model is served; serve one with: {inv('submit serve_llm')}")


def _canary_options() -> ServeOptions:
    options = ray.get(routing_state.actor().canary.remote())
    if not options:
        raise UserError(f"there is no canary. Start one: {inv('submit serve_llm -- --model MODEL --canary-percent 5')}")
    return ServeOptions(**options)


def _stop_canary(drain_s: float) -> None:
    """Stop the canary after the replicas have stopped forwarding requests to it, so that no request is lost."""
    ray.get(routing_state.actor().set_canary.remote(0, {}))
    time.sleep(2 * routing_state.REPORT_INTERVAL_S)
    drain.stop(app_name(CANARY), "the canary", drain_s)
    print("the canary is stopped", flush=True)
