"""Test how replicas leave a machine that AWS takes back, with small apps on a real Serve with several machines."""

import asyncio
import contextlib
import datetime
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import requests
from ray import serve
from ray.cluster_utils import Cluster
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from raymill import settings
from raymill.network import free_ports
from raymill.node import watchdog_worker
from raymill.ray_support.private import core
from raymill.ray_support.private import serve as private_serve
from raymill.serving import haproxy, replica_exit
from raymill.serving.api_middleware import ApiMiddleware
from raymill.serving.errors import ApiError
from raymill.serving.keys import ApiKeys
from raymill.serving.rate_limits import RequestLimits

LIMITS = RequestLimits(per_minute=1000, at_once=100, max_body=1000, timeout_s=600)
KEY = "canary-of-this-test"
DEADLINE_S = 120


# ---------------------------------------------------------------- one replica, without a cluster


@pytest.fixture
def draining(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the draining nodes, which a test changes. This node is `own`, and `other` has a replica, too."""
    nodes: dict[str, float] = {}
    context = SimpleNamespace(gcs_address="x", get_node_id=lambda: "own")
    # not in Ray's own modules, because Ray's logging also asks for the context
    monkeypatch.setattr(replica_exit, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    replica = SimpleNamespace(app_name="llm")
    monkeypatch.setattr(replica_exit, "serve", SimpleNamespace(get_replica_context=lambda: replica))
    monkeypatch.setattr(core, "draining_nodes", lambda address: dict(nodes))
    monkeypatch.setattr(private_serve, "nodes_of_running_replicas", lambda app: {"own", "other"})
    monkeypatch.setattr(replica_exit, "POLL_S", 0.01)
    return nodes


def left(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> tuple[int, list[ApiError]]:
    """Return how often a replica stopped listening, and with which errors it ended its requests, after a change."""
    stopped, ended, polls = list[float](), list[ApiError](), list[float]()
    read = core.draining_nodes

    def counted(address: str) -> dict[str, float]:
        polls.append(time.monotonic())
        return read(address)

    async def stop_listening() -> None:
        stopped.append(time.monotonic())

    async def run() -> None:
        leaving = asyncio.create_task(replica_exit.leave_in_time(ended.append))

        async def wait_for_polls(count: int) -> None:
            while len(polls) < count and not ended:
                if leaving.done():
                    leaving.result()
                await asyncio.sleep(0.01)

        await wait_for_polls(5)
        assert not stopped
        assert not ended
        change()
        await wait_for_polls(len(polls) + 5)
        leaving.cancel()

    monkeypatch.setattr(core, "draining_nodes", counted)
    monkeypatch.setattr(replica_exit, "stop_listening", stop_listening)
    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    return len(stopped), ended


@pytest.mark.parametrize(
    ("nodes", "stops"),
    [
        ({}, 0),
        ({"other": 0.0}, 0),
        ({"own": 0.0}, 1),
        ({"own": time.time() + 7200}, 1),
        ({"own": 0.0, "other": 0.0}, 0),  # AWS takes both machines back, so both answer as long as they can
    ],
)
def test_a_replica_leaves_new_requests_to_others_if_there_are_any(
    draining: dict[str, float], monkeypatch: pytest.MonkeyPatch, nodes: dict[str, float], stops: int
) -> None:
    assert left(monkeypatch, lambda: draining.update(nodes)) == (stops, [])


def test_the_requests_end_shortly_before_the_machine(
    draining: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ended = left(monkeypatch, lambda: draining.update(own=time.time() + replica_exit.END_REQUESTS_S - 1))
    assert [error.code for error in ended] == ["machine_ends"]


def test_a_control_store_that_does_not_answer_is_asked_again(
    draining: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([ConnectionError("the head restarts"), TimeoutError()])

    def read(address: str) -> dict[str, float]:
        for error in answers:
            raise error
        return dict(draining)

    monkeypatch.setattr(core, "draining_nodes", read)
    assert left(monkeypatch, lambda: draining.update(own=0.0)) == (1, [])


# ---------------------------------------------------------------- Serve, with several machines


@pytest.mark.nightly  # because it takes two minutes
@pytest.mark.skipif(not haproxy.variables("/"), reason="HAProxy is installed on Linux only")
def test_a_spot_notice_stops_no_service_early_and_cuts_no_answer_without_a_word(tmp_path: Path) -> None:
    """A process of its own runs `main`, because other tests have connected this one to another cluster."""
    (tmp_path / ".env").write_text(f"SERVE_API_KEY={KEY}\n")
    with tempfile.TemporaryDirectory(prefix="ray-test-") as folder:  # short, because of the paths of sockets
        variables = os.environ | haproxy.variables(folder, *free_ports(1))
        variables |= {"SECRETS_FILE": f"{tmp_path}/.env", "PYTHONPATH": f"{settings.PROJECT}", "TMPDIR": folder}
        variables["PATH"] = f"{sys.prefix}/bin:{os.environ['PATH']}"  # the watchdog runs `ray`
        subprocess.run([sys.executable, __file__], cwd=settings.PROJECT, env=variables, check=True, timeout=400)


class Model:
    """Answers after as many seconds as the request says, whole or as a stream, with the id of its node."""

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        async def answer(request: Request) -> Response:
            body, node = await request.json(), ray.get_runtime_context().get_node_id()
            if not body["stream"]:
                await asyncio.sleep(body["seconds"])
                return PlainTextResponse(node)

            async def parts() -> AsyncIterator[str]:
                for _ in range(4 * body["seconds"]):
                    yield "."
                    await asyncio.sleep(0.25)
                yield "end"

            return StreamingResponse(parts())

        routes = [Route("/health", lambda _: Response()), Route("/v1/completions", answer, methods=["POST"])]
        api = ApiMiddleware(Starlette(routes=routes), ApiKeys(), LIMITS, model="m")
        self._leaving = asyncio.create_task(replica_exit.leave_in_time(api.end_requests))
        return api


def deploy(replicas: int) -> None:
    deployment = serve.deployment(
        serve.ingress()(Model),
        num_replicas=replicas,
        graceful_shutdown_timeout_s=LIMITS.shutdown_s,
        health_check_period_s=1,
        ray_actor_options={"num_cpus": 0, "resources": {"spot": 1}},
    )
    serve.run(deployment.bind(), name="llm", route_prefix="/")


def ask(url: str, seconds: int = 0, *, stream: bool = False) -> requests.Response:
    """Return the answer, or what arrived of a stream before it was cut off."""
    body = {"seconds": seconds, "stream": stream}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = requests.post(f"{url}/v1/completions", json=body, headers=headers, stream=True, timeout=DEADLINE_S)
    received = b""
    with contextlib.suppress(requests.RequestException):
        for chunk in answer.iter_content(None):
            received += chunk
    answer._content = received
    return answer


def give_notice(head: str, node: str, seconds: float) -> float:
    """Run the watchdog of a node that AWS takes back in `seconds`. Return when that is."""
    end = time.time() + seconds
    notice = datetime.datetime.fromtimestamp(end, datetime.UTC).isoformat()
    host, _, port = head.partition(":")
    patch = pytest.MonkeyPatch()
    patch.setattr(watchdog_worker, "GCS_PORT", port)
    patch.setattr(watchdog_worker, "answers", lambda head: False)
    patch.setattr(watchdog_worker, "own_node_id", lambda head: node)
    patch.setattr(watchdog_worker, "spot_notice", lambda: notice)
    patch.setattr(watchdog_worker.notices, "send", print)
    threading.Thread(target=watchdog_worker.watch, args=(host,), daemon=True).start()
    return end


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        first = cluster.add_node(num_cpus=1, resources={"spot": 1})
        ray.init(address=cluster.address, log_to_driver=False)
        [port] = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        deploy(1)
        with ThreadPoolExecutor() as threads:
            alone(cluster.address, url, first.node_id)
            late = threads.submit(ask, url)  # Serve's proxy holds it until there is a replica
            cluster.remove_node(first)
            others = [cluster.add_node(num_cpus=1, resources={"spot": 1}) for _ in range(2)]
            assert late.result().text in {each.node_id for each in others}
        deploy(2)
        with_another(cluster.address, url, others[0].node_id, others[1].node_id)
        ray.shutdown()
    finally:
        cluster.shutdown()


def alone(head: str, url: str, node: str) -> None:
    """The only replica answers until shortly before the end of its machine, and its clients learn of the end."""
    wait_for(lambda: ask(url).text == node)
    with ThreadPoolExecutor() as threads:
        end = give_notice(head, node, 60)
        time.sleep(end - time.time() - watchdog_worker.STOP_SERVING_S - 1)
        assert ask(url).text == node  # half a minute after the notice
        whole, stream = (threads.submit(ask, url, 300, stream=stream) for stream in (False, True))
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "machine_ends"
        assert whole.result().headers["Retry-After"] == "5"
        assert stream.result().text.startswith(".")
        assert "end" not in stream.result().text
        print(f"the requests ended {end - time.time():.0f} s before the machine", flush=True)
    wait_for(lambda: not private_serve.nodes_of_running_replicas("llm"))


def with_another(head: str, url: str, node: str, other: str) -> None:
    """The other replica gets the new requests. No request fails, and the running ones finish."""
    wait_for(lambda: {ask(url).text for _ in range(10)} == {node, other})
    with ThreadPoolExecutor() as threads:
        long = [threads.submit(ask, url, 40) for _ in range(6)]
        time.sleep(2)
        give_notice(head, node, 120)
        answers = list[requests.Response]()

        def all_from_the_other() -> bool:
            answers.extend(new := [ask(url) for _ in range(20)])
            return {answer.text for answer in new} == {other}

        wait_for(all_from_the_other)
        assert not any(each.done() for each in long), "the answers are too short for this test"
        assert {answer.status_code for answer in answers} == {200}
        assert {each.result().text for each in long} == {node, other}
        print(f"{len(answers)} requests were answered while one of two machines ended", flush=True)


if __name__ == "__main__":
    main()
