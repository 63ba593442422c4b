"""Deploys Serve applications, waits until they are healthy, and stops them."""

import logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import ray
import requests
from ray import serve
from ray.serve.deployment import Application
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from raymill.errors import UserError
from raymill.ray_support.private import serve as private_serve
from raymill.serving import drain, http_server, parsers, preflight, routing_state
from raymill.serving.hooks import Hooks
from raymill.serving.options import APP, CANARY, DRAIN_S, ServeOptions, app_name
from raymill.serving.preflight import check_cpus
from raymill.settings import inv

PROGRESS_INTERVAL_S = 15


class Deployment(NamedTuple):
    """An application to deploy."""

    job: str
    """Job that deploys the application."""
    app: str
    """Name of the Serve application."""
    name: str
    """Name of the application in messages."""
    root: str
    """URL of the HTTP server."""
    path: str
    """Path of the application below `root`."""
    timeout_s: int
    """Seconds to wait for the application to become healthy."""
    stops_first: bool = False
    """Whether an update stops the old replicas before it starts new ones."""

    @property
    def url(self) -> str:
        """URL of the application."""
        return self.root + self.path.rstrip("/")


def deploy_model(options: ServeOptions, functions: Hooks) -> None:
    """Deploy a model, or update the one that is served, and return when it is healthy.

    `functions` are the user's own checks and loggers of requests.

    Raises:
        UserError: the port or the name is taken, a canary or additional model lacks a main model, the cluster is too
            small, or the application does not become healthy.
    """
    check_cpus(options)
    http_server.check_address(options)
    print(f"serve_llm: loading vLLM to serve {options.served_name} from {options.source}", flush=True)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with ThreadPoolExecutor(1) as background:
        started = background.submit(http_server.start, options)
        from raymill.serving import app  # imports vLLM while Serve starts, because both are slow

        started.result()
    options = parsers.resolve(resolve_name(options))
    state = routing_state.actor()
    address, zone = http_server.cluster_address(options), preflight.find_zone(options)
    application = app.build(options, functions, address, zone)
    name, root, timeout_s = options.served_name, options.root, options.start_timeout_s
    stops_first = options.max_surge_percent == 0
    deploy_app(application, Deployment("serve_llm", options.app, name, root, options.path, timeout_s, stops_first))
    if options.canary_percent:
        ray.get(state.set_canary.remote(options.canary_percent, options.model_dump()))


def resolve_name(options: ServeOptions) -> ServeOptions:
    """Give a canary the main model's name, and check that other models have different names.

    Raises:
        UserError: no main model is served, another model has this name, or the main model would get another name
            although it has a canary.
    """
    apps = ray.get(routing_state.actor().apps.remote())
    name = apps[routing_state.ROOT]["models"][0] if routing_state.ROOT in apps else None
    if name is None and options.path != routing_state.ROOT:
        raise UserError(f"no main model is served yet. Serve one first: {inv('submit serve_llm')}")
    if options.canary_percent:
        return options.model_copy(update={"model_name": name})
    for path, app in apps.items():
        if path not in (options.path, CANARY) and options.served_name == app["models"][0]:
            remedy = "leave out --add" if options.add else f"first run: {inv('models -- --end', options.served_name)}"
            raise UserError(
                f"a model named {options.served_name} is already served. Use another --model-name, or {remedy}."
            )
    of_canary = apps[CANARY]["models"][0] if CANARY in apps else name
    if (
        options.path == routing_state.ROOT
        and app_name(CANARY) in routing_state.running_apps()
        and options.served_name != of_canary
    ):
        raise UserError(
            f"the canary of {of_canary} cannot answer requests for {options.served_name}. "
            f"First end it: {inv('models -- --promote')}, or {inv('models -- --roll-back')}"
        )
    return options


def deploy_app(application: Application, deployment: Deployment) -> None:
    """Deploy an application, or update the running one, and return when it is healthy.

    Raises:
        UserError: the application does not become healthy. The previous version keeps running. If there is none, the
            application is deleted.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # `_wait_until_healthy` prints the progress
    is_update = is_healthy(deployment.url)
    drain_s = private_serve.shutdown_timeout_s(deployment.app)
    if count := private_serve.ongoing_requests(deployment.app):
        rest = ". Until then, new requests get 503" if deployment.stops_first else ""
        print(
            f"{deployment.job}: running answers ({count}) end before their replica does, within {drain_s:.0f} s{rest}",
            flush=True,
        )
    target = serve.RunTarget(application, name=deployment.app, route_prefix=deployment.path)
    serve.run_many([target], wait_for_applications_running=False)
    _wait_until_healthy(deployment._replace(timeout_s=deployment.timeout_s + round(drain_s)), is_update=is_update)


def _wait_until_healthy(deployment: Deployment, *, is_update: bool) -> None:
    """Wait until all replicas are new and healthy."""
    started = time.monotonic()
    printed, printed_at = "", 0.0
    while True:
        status = serve.status().applications[deployment.app]
        waited = time.monotonic() - started
        if status.status == ApplicationStatus.RUNNING and is_healthy(deployment.url):
            print(f"{deployment.job}: healthy after {waited:.0f} s", flush=True)
            return
        if status.status == ApplicationStatus.DEPLOY_FAILED or waited > deployment.timeout_s:
            if not is_update:
                stop(deployment.app)
            outcome = "The previous version keeps running" if is_update else "It was stopped"
            raise UserError(
                f"{deployment.name} is not healthy after {waited:.0f} s: {failure_reason(status)}. "
                f"{outcome}. Fix the cause, then run: {inv('submit', deployment.job)}"
            )
        if (state := _replica_states(status)) != printed or waited > printed_at + PROGRESS_INTERVAL_S:
            print(f"{deployment.job}: {waited:3.0f} s of at most {deployment.timeout_s}: {state}", flush=True)
            printed, printed_at = state, waited
        time.sleep(0.5)


def failure_reason(app: ApplicationStatusOverview) -> str:
    """Return the message of the first unhealthy deployment or of its failed replica, without traceback and period."""
    messages = [deployment.message for deployment in app.deployments.values() if deployment.message.strip()]
    if not messages:
        return app.message or f"Serve gives no reason; read the logs with {inv('logs')}"
    lines = messages[0].strip().splitlines()
    reason = lines[-1] if "Traceback" in messages[0] else " ".join(lines)
    return re.sub(r"^(\w+(Error|Exception): )+", "", reason).rstrip(".")


def _replica_states(app: ApplicationStatusOverview) -> str:
    """Return the number of replicas in each state, for each deployment."""
    parts = []
    for name, deployment in app.deployments.items():
        counts = [f"{count} {state.lower()}" for state, count in deployment.replica_states.items()]
        parts.append(f"{name} {' and '.join(counts) or 'has no replica yet'}")
    return ", ".join(parts)


def is_healthy(url: str) -> bool:
    """Return whether the application at the URL is healthy."""
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


def stop(app: str = APP, drain_s: float = DRAIN_S) -> None:
    """Stop an application, as `drain.stop` does. If Serve has no other application, stop Serve itself."""
    drain.stop(app, app, drain_s)
    if not serve.status().applications:
        serve.shutdown()
        ray.kill(routing_state.actor())


def wait_for_interrupt(app: str = APP) -> None:
    """Wait for Ctrl-C, then stop the application. Ray, which this process started, runs as long as the process."""
    print("serving until Ctrl-C", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        print("\nstopping", flush=True)
        drain.stop(app, app)  # stops the engines cleanly; Serve and Ray end with this process
