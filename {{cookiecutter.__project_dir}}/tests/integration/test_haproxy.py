"""Test a real HAProxy in front of a stub replica, with the configuration that Ray writes and haproxy.sh changes."""

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest
import uvicorn
from processes import read_all
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster.network import free_ports
from pipeline.ray_support.private import http_1_0
from pipeline.serving import haproxy

pytestmark = pytest.mark.skipif(not haproxy.environment("/"), reason="HAProxy is installed on Linux only")

START_S = 60
LISTENS = "x-request-disconnect-disabled"
OPEN_S = 45
"""If HAProxy leaves a connection open for this many seconds, the test fails."""


class Replica:
    """A real server that echoes requests. A stream waits for `resume` after its first chunk."""

    def __init__(self) -> None:
        self.requests = 0
        self.resume = threading.Event()
        [self.port] = free_ports(1)
        routes = [
            Route("/-/healthz", lambda _: Response("success")),
            Route("/app/stream", self._stream),
            Route("/app/none", lambda _: PlainTextResponse("Deployment(name='Server') is unavailable", 503)),
            Route("/app/full", lambda _: JSONResponse({"error": "full"}, 503, {"Retry-After": "1"})),
            Route("/{path:path}", self._echo, methods=["GET", "POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=self.port, log_level="error")
        self.server = uvicorn.Server(config)

    async def _echo(self, request: Request) -> Response:
        self.requests += 1
        body = await request.body()
        return JSONResponse({"headers": request.headers.items(), "length": len(body)})

    async def _stream(self, _: Request) -> Response:
        async def chunks() -> AsyncIterator[str]:
            yield "first"
            await asyncio.to_thread(self.resume.wait, START_S)
            yield "last"

        return StreamingResponse(chunks())


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    server = Replica()
    thread = threading.Thread(target=server.server.run)
    thread.start()
    wait_for(lambda: server.server.started)
    yield server
    server.server.should_exit = True
    thread.join()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Proxy:
    """HAProxy as Ray starts it.

    /app works, the replica of /gone is dead, and so is the request router of /routed. /empty has no replica yet, so its
    requests go to Serve's proxy.
    """

    def __init__(self, folder: Path, replica: Replica) -> None:
        folder.mkdir()
        self.port, gone = free_ports(2)
        config = HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=self.port),
            socket_path=f"{folder}/a",
            metrics_socket_path=f"{folder}/m",
            server_state_base=str(folder),
            server_state_file=f"{folder}/server-state",
            has_received_routes=True,
            is_head=True,
        )
        alive = ServerConfig(name="alive", host="127.0.0.1", port=replica.port, replica_id="alive")
        dead = ServerConfig(name="dead", host="127.0.0.1", port=gone)
        backends = [
            BackendConfig(name="http-app", app_name="app", path_prefix="/app", servers=[alive]),
            BackendConfig(name="http-empty", app_name="empty", path_prefix="/empty", servers=[], fallback_server=alive),
            BackendConfig(name="http-gone", app_name="gone", path_prefix="/gone", servers=[dead]),
            BackendConfig(
                name="http-routed",
                app_name="routed",
                path_prefix="/routed",
                servers=[alive],
                ingress_request_router_servers=[dead],
            ),
        ]
        file = f"{folder}/node/haproxy.cfg"  # Ray gives each node its own folder
        writer = HAProxyApi(config, {each.name: each for each in backends}, config_file_path=file)
        writer._generate_config_file_internal()
        environment = os.environ | haproxy.environment(str(folder))
        command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", file]
        self.process = subprocess.Popen(command, env=environment)
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=START_S)
        wait_for(lambda: self._status("/app/v1/models") == 200 and self._status("/gone/") == 503)

    def _status(self, path: str) -> int:
        assert self.process.poll() is None
        try:
            return self.client.get(path).status_code
        except httpx2.TransportError:
            return 0

    def send_raw(self, *lines: bytes) -> tuple[float, bytes]:
        """Send a possibly incomplete request. Return the seconds until the connection is closed, and the answer."""
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", self.port), timeout=OPEN_S) as connection:
            connection.sendall(b"\r\n".join(lines))
            answer = b""
            while chunk := connection.recv(2**16):
                answer += chunk
        return time.monotonic() - started, answer


@pytest.fixture(scope="module")
def proxy(replica: Replica, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    running = Proxy(tmp_path_factory.mktemp("proxy") / "p", replica)
    yield running
    running.process.terminate()
    running.process.wait(START_S)


def error(answer: httpx2.Response, status: int) -> dict[str, str | None]:
    """Return the error in an answer, which must have OpenAI's format and this status."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return found


# ---------------------------------------------------------------- headers


def test_clients_cannot_set_headers_that_ray_interprets(proxy: Proxy) -> None:
    names = ["serve_multiplexed_model_id", "Serve-Multiplexed-Model_Id", "X-Session-Id", "x_session_id"]
    names += ["X-Request-Timeout-Seconds", "X-Serve-Router-Kv-Token-Key"]
    kept = [("authorization", "Bearer some"), ("x-mine", "\u00ff"), ("x-request-id", "req_1.2-3:4")]
    sent = [
        (name.encode(), value.encode("latin-1"))
        for name, value in [*kept, *((name, "\u00ff") for name in [*names, LISTENS])]
    ]
    for path in ("/app/", "/routed/", "/empty/"):
        seen = dict(proxy.client.get(path, headers=sent).json()["headers"])
        assert not [name for name in names if name.lower() in seen]
        assert dict(kept).items() <= seen.items()
        assert seen.get(LISTENS) == (None if path == "/empty/" else "?1")


@pytest.mark.parametrize("request_id", [b"\xff", b"a b", b"a,b", b"x" * 129, b"{}", "ä".encode()])
@pytest.mark.parametrize("path", ["/app/", "/routed/"])
def test_an_invalid_request_id_is_rejected_before_a_replica_sees_it(
    proxy: Proxy, replica: Replica, request_id: bytes, path: str
) -> None:
    before = replica.requests
    answer = proxy.client.post(path, headers=[(b"x-request-id", request_id)], json={})
    assert error(answer, 400)["code"] == "invalid_request_id"
    assert replica.requests == before


def test_two_request_ids_are_rejected(proxy: Proxy) -> None:
    answer = proxy.client.get("/app/", headers=[(b"x-request-id", b"one"), (b"x-request-id", b"two")])
    assert error(answer, 400)["code"] == "invalid_request_id"


# ---------------------------------------------------------------- timeouts and streaming


def test_incomplete_requests_are_closed(proxy: Proxy, replica: Replica) -> None:
    post = [b"POST /app/v1/completions HTTP/1.1", b"Host: localhost"]
    partial = {
        "nothing": [b""],
        "half a line": [b"POST /app/"],
        "half the headers": [*post, b"X-Mine: "],
        "half a body": [*post, b"Content-Length: 100", b"", b'{"model":'],
        "half a chunk": [*post, b"Transfer-Encoding: chunked", b"", b"10", b'{"model":'],
    }
    before = replica.requests
    with ThreadPoolExecutor(len(partial)) as clients:
        answers = dict(zip(partial, clients.map(lambda lines: proxy.send_raw(*lines), partial.values()), strict=True))
    assert {what: seconds for what, (seconds, _) in answers.items() if seconds > OPEN_S} == {}
    assert replica.requests == before
    for what in ("half a body", "half a chunk"):
        head, _, body = answers[what][1].partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["code"] == "timeout"


def test_large_and_chunked_bodies_pass_unchanged(proxy: Proxy) -> None:
    large = b"x" * 3_000_000
    assert proxy.client.post("/app/", content=large).json()["length"] == len(large)
    chunks = (large[start : start + 100_000] for start in range(0, len(large), 100_000))
    assert proxy.client.post("/app/", content=chunks).json()["length"] == len(large)
    expect = {"Expect": "100-continue"}
    assert proxy.client.post("/app/", content=large, headers=expect).json()["length"] == len(large)


def test_a_stream_arrives_in_chunks(proxy: Proxy, replica: Replica) -> None:
    with proxy.client.stream("GET", "/app/stream") as answer:
        chunks = answer.iter_text()
        assert next(chunks) == "first"
        replica.resume.set()
        assert "".join(chunks) == "last"


def test_a_client_of_http_1_0_gets_a_stream_without_chunk_sizes(proxy: Proxy, replica: Replica) -> None:
    """nginx asks with HTTP/1.0 by default. The answer ends with the connection, also if the client wants to keep it."""
    http_1_0.support()
    replica.resume.set()
    for connection in (b"Connection: close", b"Connection: keep-alive", b"X-Mine: nothing"):
        seconds, answer = proxy.send_raw(b"GET /app/stream HTTP/1.0", connection, b"", b"")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert body == b"firstlast"
        assert b"chunked" not in head.lower()
        assert seconds < OPEN_S
    plain = [b"GET /app/ HTTP/1.0", b"", b""]
    assert b"content-length: " in proxy.send_raw(*plain)[1].lower()
    with proxy.client.stream("GET", "/app/stream") as stream:
        assert (stream.headers["transfer-encoding"], stream.read()) == ("chunked", b"firstlast")


# ---------------------------------------------------------------- errors


def test_haproxys_own_errors_have_openais_format(proxy: Proxy) -> None:
    assert error(proxy.client.get("/absent"), 404)["code"] == "not_found"
    for path in ("/gone/v1/models", "/routed/v1/completions"):
        answer = proxy.client.post(path, json={})
        assert error(answer, 503)["message"]
    assert proxy.client.get("/gone/").headers["retry-after"] == "5"


def test_errors_of_serves_proxy_have_openais_format(proxy: Proxy) -> None:
    answer = proxy.client.get("/app/none")
    assert error(answer, 503)["message"] == "no replica is available; try again in a few seconds"
    assert answer.headers["retry-after"] == "5"


def test_a_replicas_own_503_passes_unchanged(proxy: Proxy) -> None:
    answer = proxy.client.get("/app/full")
    assert (answer.json(), answer.headers["retry-after"]) == ({"error": "full"}, "1")


# ---------------------------------------------------------------- ports


def test_haproxy_listens_only_on_its_own_address(proxy: Proxy) -> None:
    found = read_all([psutil.Process(proxy.process.pid)], lambda each: each.net_connections("inet"))
    listening = {each.laddr for [*connections] in found for each in connections if each.status == psutil.CONN_LISTEN}
    assert {(address.ip, address.port) for address in listening} == {("127.0.0.1", proxy.port)}
