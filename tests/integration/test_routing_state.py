"""Test canaries and additional models with small apps on a real Ray Serve, while they scale to zero and back."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import ray
import requests
from processes import children
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs import models
from raymill import settings
from raymill.errors import UserError
from raymill.serving import deploy, haproxy, routing_state
from raymill.serving.accounting import MetricsMiddleware
from raymill.serving.body_checks import inspect
from raymill.serving.model_router import ModelRouter
from raymill.serving.options import ModelsOptions, ServeOptions
from raymill.serving.routing_state import CANARY, ROOT, Reporter

pytestmark = pytest.mark.skipif(not haproxy.variables("/"), reason="HAProxy is installed on Linux only")

PATHS = {ROOT: "own", "/models/sql": "sql", CANARY: "own"}
START_S = 120


def model() -> type:
    """Return a class that Ray pickles by value, because replicas cannot import this module."""

    class Model:
        """A served model without an engine: only the metrics middleware and, at the root, the model router."""

        def __init__(self, path: str, model: str, address: str) -> None:
            self._path, self._model, self._address = path, model, address

        async def __serve_build_asgi_app__(self) -> ASGIApp:
            async def answer(_: Request) -> Response:
                return JSONResponse({"from": self._path})

            routes = [Route("/health", lambda _: Response()), Route("/v1/completions", answer, methods=["POST"])]
            reporter = Reporter(self._path)
            self._task = asyncio.create_task(reporter.report_forever(lambda: [self._model]))
            app = MetricsMiddleware(Starlette(routes=routes), reporter.record)
            if self._path != ROOT:
                return app
            router = ModelRouter(app, self._model, self._address, lambda: reporter.routes)

            async def read(scope: Scope, receive: Receive, send: Send) -> None:
                """Put the body and a token into the scope, as `ApiMiddleware` does."""
                if scope["type"] == "http" and scope["method"] == "POST":
                    message = await receive()
                    scope = {**scope, "state": {"body": inspect(message["body"]), "token": b"token"}}
                await router(scope, receive, send)

            return read

    return Model


def deploy_own(path: str, address: str) -> None:
    """Serve an app that scales to zero soon after it becomes idle."""
    idle = {"min_replicas": 0, "max_replicas": 1, "initial_replicas": 1, "upscale_delay_s": 0, "downscale_delay_s": 1}
    scaling = idle | {"metrics_interval_s": 0.5, "look_back_period_s": 1}
    app = serve.deployment(serve.ingress()(model()), autoscaling_config=scaling, ray_actor_options={"num_cpus": 0.1})
    serve.run(app.bind(path, PATHS[path], address), name=routing_state.app_name(path), route_prefix=path)


@pytest.fixture(scope="module")
def address(ray_session: None) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    # on a busy machine, the first replica could otherwise be idle, and stop, before the actor has its first report
    ray.get(routing_state.actor().apps.remote())
    for path in PATHS:
        deploy_own(path, f"http://127.0.0.1:{port}")
    wait_for(lambda: ray.get(routing_state.actor().apps.remote()).keys() == PATHS.keys())
    yield f"http://127.0.0.1:{port}"
    for path in reversed(PATHS):
        deploy.stop(routing_state.app_name(path))


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def replicas() -> int:
    """Return the number of replicas of all apps."""
    deployments = [each for app in serve.status().applications.values() for each in app.deployments.values()]
    return sum(sum(deployment.replica_states.values()) for deployment in deployments)


def kill_actor() -> None:
    """Kill the routing actor's process, as the kernel does when memory runs out. Wait until the actor is back."""
    [pid] = [pid for pid, name in children().items() if name == "ray::RoutingState"]
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(routing_state.actor().apps.remote())
            return not psutil.pid_exists(pid)
        return False

    wait_for(is_back)


def ask(address: str, model: str) -> Any:
    answer = requests.post(f"{address}/v1/completions", json={"model": model}, timeout=START_S)
    return answer.json()["from"] if answer.ok else answer.status_code


def additional(model: str) -> ServeOptions:
    options = settings.load(ServeOptions, "serve", profile="local")
    return options.model_copy(update={"model_name": model, "add": True})


def main(model: str) -> ServeOptions:
    return additional(model).model_copy(update={"add": False})


def test_apps_and_the_canarys_share_outlive_their_replicas_and_the_actor(address: str) -> None:
    ray.get(routing_state.actor().set_canary.remote(100, additional("own").model_dump()))
    wait_for(lambda: replicas() == 0)
    kill_actor()  # no replica is left that could report its models to the new actor
    shown = ray.get(routing_state.actor().apps.remote())
    assert {path: app["models"] for path, app in shown.items()} == {path: [model] for path, model in PATHS.items()}
    with pytest.raises(UserError, match="a model named own is already served"):
        deploy.resolve_name(additional("own"))
    assert deploy.resolve_name(additional("another")).served_name == "another"
    with pytest.raises(UserError, match=r"the canary of own cannot answer requests for new\. First end it"):
        deploy.resolve_name(main("new"))
    assert deploy.resolve_name(main("own")).served_name == "own"
    wait_for(lambda: ask(address, "own") == CANARY)  # a replica of the root app gets the routes when it starts
    assert ask(address, "sql") == "/models/sql"


@pytest.mark.nightly
def test_a_stopped_app_disappears_at_once(address: str) -> None:
    wait_for(lambda: ask(address, "sql") == "/models/sql")
    with pytest.raises(UserError, match=r"a model named sql is already served.* inv models -- --end sql"):
        deploy.resolve_name(main("sql").model_copy(update={"canary_percent": 0}))
    models.main(ModelsOptions(end="sql"))
    assert "/models/sql" not in ray.get(routing_state.actor().apps.remote())
    # this stub answers for any model; a real engine would reject the name
    wait_for(lambda: ask(address, "sql") in (ROOT, CANARY))
    models.main(ModelsOptions(roll_back=True))
    assert ray.get(routing_state.actor().apps.remote()).keys() == {ROOT}
    assert deploy.resolve_name(main("new")).served_name == "new"
    wait_for(lambda: ask(address, "own") == ROOT)
