"""Test what becomes of running answers when an application is updated or stopped, with small apps on a real Serve."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import requests
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.serve_rag import PARTS
from raymill import drain as cluster_drain
from raymill import settings
from raymill.errors import UserError
from raymill.rag import app as rag_app
from raymill.rag.options import RagOptions
from raymill.ray_support.private import serve as private_serve
from raymill.serving import deploy, drain, haproxy
from raymill.serving.deploy import Deployment
from raymill.serving.hooks import Hooks
from raymill.serving.options import ModelsOptions, ServeOptions
from raymill.serving.rate_limits import RequestLimits

pytestmark = pytest.mark.skipif(not haproxy.variables("/"), reason="HAProxy is installed on Linux only")

LIMITS = RequestLimits(per_minute=1000, at_once=10, max_body=1000, timeout_s=90)
SERVES_DEFAULT_S = 20
"""Seconds that Serve gives requests by default (`graceful_shutdown_timeout_s`)."""
START_S = 120


def model() -> type:
    """Return a class that Ray pickles by value, because replicas cannot import this module."""

    class Model:
        """Streams an answer for as many seconds as the request says."""

        def __init__(self, version: int) -> None:
            self._version = version

        async def __serve_build_asgi_app__(self) -> ASGIApp:
            async def answer(request: Request) -> Response:
                seconds = (await request.json())["seconds"]

                async def parts() -> AsyncIterator[str]:
                    for _ in range(round(4 * seconds)):
                        yield "."
                        await asyncio.sleep(0.25)
                    yield f"end of {self._version}"

                return StreamingResponse(parts())

            routes = [Route("/health", lambda _: Response()), Route("/v1/completions", answer, methods=["POST"])]
            return Starlette(routes=routes)

    return Model


def app(version: int) -> serve.Application:
    deployment = serve.deployment(
        serve.ingress()(model()),
        max_surge_percent=100,
        graceful_shutdown_timeout_s=LIMITS.shutdown_s,
        ray_actor_options={"num_cpus": 0.1},
    )
    return deployment.bind(version)


@pytest.fixture(scope="module")
def address(ray_session: None) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def deployed(address: str, name: str, version: int) -> str:
    """Deploy or update an app. Return its URL."""
    deployment = Deployment("serve_llm", name, name, address, f"/{name}", START_S)
    deploy.deploy_app(app(version), deployment)
    return deployment.url


def read(url: str, seconds: float) -> str:
    """Return the answer, or what arrived of it before it was cut off."""
    received = ""
    with requests.post(f"{url}/v1/completions", json={"seconds": seconds}, stream=True, timeout=START_S) as answer:
        try:
            for chunk in answer.iter_content(None):
                received += chunk.decode()
        except requests.RequestException:
            return received
    return received


def begin(threads: ThreadPoolExecutor, url: str, app: str, seconds: float, count: int = 1) -> list[Future[str]]:
    """Ask `count` times. Return when all answers have begun."""
    asked = [threads.submit(read, url, seconds) for _ in range(count)]
    deadline = time.monotonic() + START_S
    while private_serve.ongoing_requests(app) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return asked


def test_an_update_waits_for_answers_that_take_longer_than_serves_default(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = deployed(address, "updated", 1)
    with ThreadPoolExecutor() as threads:
        answers = begin(threads, url, "updated", SERVES_DEFAULT_S + 8, count=2)
        deployed(address, "updated", 2)
        assert [answer.result() for answer in answers] == ["." * 4 * (SERVES_DEFAULT_S + 8) + "end of 1"] * 2
        assert read(url, 0) == "end of 2"
        assert private_serve.nodes_of_running_replicas("updated") == {ray.get_runtime_context().get_node_id()}
    assert "running answers (2) end before their replica does, within 105 s\n" in capsys.readouterr().out
    drain.stop("updated", "updated")


def test_a_stop_waits_for_short_answers_and_cuts_off_long_ones(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor() as threads:
        [short] = begin(threads, deployed(address, "first", 1), "first", 4)
        drain.stop("first", "the first", drain_s=60)
        assert short.result().endswith("end of 1")
        printed = capsys.readouterr().out
        assert printed.endswith("the first: 1 answer is running; what is left after 60 s is cut off\n")
        long = begin(threads, deployed(address, "second", 1), "second", 300, count=2)
        started = time.monotonic()
        drain.stop("second", "the second", drain_s=3)  # Serve itself would raise TimeoutError after a minute
        assert time.monotonic() - started < 60
        assert not [answer for answer in long if "end" in answer.result()]
        assert "the second: 2 cut off. For more time, use --drain SECONDS" in capsys.readouterr().out
    assert not {"first", "second"} & serve.status().applications.keys()
    assert requests.get(f"{address}/second/health", timeout=START_S).status_code == 404


def test_an_update_without_a_spare_replica_says_how_long_requests_may_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[Deployment] = []
    monkeypatch.setattr(deploy, "is_healthy", lambda url: True)
    monkeypatch.setattr(private_serve, "shutdown_timeout_s", lambda app: 615.0)
    monkeypatch.setattr(private_serve, "ongoing_requests", lambda app: 3)
    monkeypatch.setattr(serve, "run_many", lambda *_, **__: None)
    monkeypatch.setattr(deploy, "_wait_until_healthy", lambda deployment, **_: waited.append(deployment))
    deploy.deploy_app(app(1), Deployment("serve_llm", "llm", "tiny", "http://x", "/", 60, stops_first=True))
    assert (
        "(3) end before their replica does, within 615 s. Until then, new requests get 503" in capsys.readouterr().out
    )
    assert waited[0].timeout_s == 60 + 615


def test_replicas_may_take_as_long_to_stop_as_a_request() -> None:
    from raymill.serving import app as serving_app  # imports vLLM

    options = settings.load(ServeOptions, "serve", profile="local")
    options = options.model_copy(update={"request_timeout_s": 700.0, "tool_parser": "", "reasoning_parser": ""})
    rag = rag_app.build(settings.load(RagOptions, "rag", profile="local"), PARTS, "index", "http://x", options.limits)
    parts = [rag, *rag._bound_deployment.init_args[0], serving_app.build(options, Hooks(), "http://x")]
    times = [part._bound_deployment._deployment_config.graceful_shutdown_timeout_s for part in parts]
    assert times == [715] * 5


def test_a_drain_is_20_seconds_unless_it_is_given() -> None:
    assert ModelsOptions(end="sql").drain_s == drain.DRAIN_S == 20
    assert ModelsOptions(end="sql", drain=0).drain_s == 0
    with pytest.raises(ValueError, match="use only one of"):
        ModelsOptions(end="sql", end_all=True)
    for change in ({}, {"canary_percent": 20.0}):
        with pytest.raises(ValueError, match="--drain stops nothing by itself"):
            ModelsOptions.model_validate({"drain": 5} | change)


# ---------------------------------------------------------------- inv down


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list of the jobs that are submitted, with their options. They succeed."""
    submitted: list[list[str]] = []
    monkeypatch.setattr(
        cluster_drain.submission, "submit", lambda _, job, options: submitted.append([job, *options]) or "id"
    )
    monkeypatch.setattr(cluster_drain.submission, "follow", lambda *_: 0)
    return submitted


def target(monkeypatch: pytest.MonkeyPatch, *apps: str) -> Any:
    serving = {"applications": {name: {} for name in apps}}
    monkeypatch.setattr(cluster_drain.status, "snapshot", lambda _: SimpleNamespace(serve=serving))
    return SimpleNamespace(connect=lambda: None)


def test_down_stops_what_is_served_first(monkeypatch: pytest.MonkeyPatch, jobs: list[list[str]]) -> None:
    cluster_drain.before_down(target(monkeypatch), 20)
    assert jobs == []
    cluster_drain.before_down(target(monkeypatch, "llm", "rag"), 7)
    assert jobs == [["models", "--end-all", "--drain", "7"]]


@pytest.mark.parametrize("error", [UserError("the head is lost"), ConnectionError("refused"), KeyError("serve")])
def test_down_goes_on_without_a_cluster_that_answers(
    monkeypatch: pytest.MonkeyPatch, jobs: list[list[str]], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def lost(*_: Any) -> Any:
        raise error

    cluster_drain.before_down(SimpleNamespace(connect=lost), 20)  # type: ignore[arg-type]
    assert jobs == []
    shown = capsys.readouterr().out
    assert ("what is served is unknown" in shown) == (not isinstance(error, UserError))
    monkeypatch.setattr(cluster_drain.submission, "follow", lost)
    cluster_drain.before_down(target(monkeypatch, "llm"), 20)
    assert capsys.readouterr().out == f"running answers are cut off: {error}\n"


def test_down_does_not_wait_for_a_job_that_hangs(
    monkeypatch: pytest.MonkeyPatch, jobs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The cluster costs money until it is ended."""
    ended = threading.Event()
    monkeypatch.setattr(cluster_drain, "START_AND_STOP_S", 0.5)
    monkeypatch.setattr(cluster_drain.submission, "follow", lambda *_: ended.wait(START_S))
    cluster_drain.before_down(target(monkeypatch, "llm"), 1)
    assert jobs
    assert not ended.is_set()
    assert "have not stopped after 2 s, so they end with the cluster" in capsys.readouterr().out
    ended.set()


def test_ctrl_c_while_down_waits_keeps_the_cluster(monkeypatch: pytest.MonkeyPatch, jobs: list[list[str]]) -> None:
    ended = threading.Event()

    def follow(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended.wait(START_S)

    monkeypatch.setattr(cluster_drain.submission, "follow", follow)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster_drain.before_down(target(monkeypatch, "llm"), 20)
    finally:
        signal.signal(signal.SIGINT, before)
        ended.set()
    assert jobs
