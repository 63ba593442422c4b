"""Test a real HAProxy in front of a stub replica, with the configuration that Ray writes and haproxy.sh changes."""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import psutil
import pytest
import uvicorn
from processes import read_all
from ray.serve._private.constants import RAY_SERVE_PORT_QUARANTINE_S
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from raymill import settings
from raymill.network import free_ports
from raymill.ray_support.private import http
from raymill.serving import haproxy
from raymill.serving.options import ServeOptions

pytestmark = pytest.mark.skipif(not haproxy.variables("/"), reason="HAProxy is installed on Linux only")

START_S = 60
LISTENS = "x-request-disconnect-disabled"
WITH_KEY = {"X-RateLimit-Limit-Requests": "600"}
"""Header that ApiMiddleware adds if the request had a valid key."""
ANSWER_S = 30
"""If a client gets no answer within this many seconds, it is not served."""
OPEN_S = 45
"""If HAProxy leaves a connection open for this many seconds, the test fails."""


class BrokenReplica(socketserver.BaseRequestHandler):
    """A server that closes the connection instead of answering, except health checks."""

    def handle(self) -> None:
        if b"/-/healthz" in self.request.recv(2**16):
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


class Replica:
    """A real server that echoes requests. A stream waits for `resume` after its first chunk."""

    def __init__(self) -> None:
        self.requests = 0
        self.resume = threading.Event()
        [self.port] = free_ports(1)
        routes = [
            Route("/-/healthz", lambda _: Response("success")),
            Route("/app/stream", self._stream),
            Route("/app/none{path:path}", lambda _: PlainTextResponse("Deployment(name='Server') is unavailable", 503)),
            Route("/app/denied", lambda _: Response(status_code=401)),
            Route("/app/limited", lambda _: Response(status_code=429, headers=WITH_KEY)),
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

    /app works, the replica of /broken does not answer, the replica of /gone is dead, and so is the request router of
    /routed. /empty has no replica yet, so its requests go to Serve's proxy.
    """

    def __init__(self, folder: Path, replica: Replica, broken: int, **changes: str) -> None:
        folder.mkdir()
        self.port, gone = free_ports(2)
        config = HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=self.port),
            socket_path=f"{folder}/a",
            metrics_socket_path=f"{folder}/m",
            server_state_base=str(folder),
            server_state_file=f"{folder}/server-state",
            has_received_routes=True,
            health_check_inter="60s",  # on a busy machine, a replica with thousands of connections may fail a check
            is_head=True,
        )
        alive = ServerConfig(name="alive", host="127.0.0.1", port=replica.port, replica_id="alive")
        dead = ServerConfig(name="dead", host="127.0.0.1", port=gone)
        backends = [
            BackendConfig(name="http-app", app_name="app", path_prefix="/app", servers=[alive]),
            BackendConfig(name="http-empty", app_name="empty", path_prefix="/empty", servers=[], fallback_server=alive),
            BackendConfig(
                name="http-broken",
                app_name="broken",
                path_prefix="/broken",
                servers=[ServerConfig(name="broken", host="127.0.0.1", port=broken)],
            ),
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
        self.writer = HAProxyApi(config, {each.name: each for each in backends}, config_file_path=file)
        self.config = Path(file)
        self.processes: list[subprocess.Popen] = []
        """The current process, and those of earlier configurations that still run, oldest first."""
        self._variables = os.environ | haproxy.variables(str(folder)) | changes
        self._start()
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=START_S)
        wait_for(lambda: self._status("/app/v1/models") == 200 and self._status("/gone/") == 503)

    @property
    def process(self) -> subprocess.Popen:
        """The process that accepts connections."""
        return self.processes[-1]

    def _start(self, *arguments: str) -> None:
        self.writer._generate_config_file_internal()
        command = [self._variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(self.config), *arguments]
        self.processes.append(subprocess.Popen(command, env=self._variables))

    def reload(self) -> None:
        """Start another process as Ray does when the replicas change. The old ones finish their requests."""
        newest, *older = reversed([str(each.pid) for each in self.running()])
        self._start("-sf", newest, *reversed(older), "-x", self.writer.cfg.socket_path)
        wait_for(lambda: asyncio.run(self.writer._get_running_pid()) == self.process.pid)

    def running(self) -> list[subprocess.Popen]:
        """Return the processes that have not ended, oldest first."""
        self.processes = [each for each in self.processes if each.poll() is None]
        return self.processes

    def stop(self) -> None:
        """End all processes at once."""
        for process in self.running():
            process.terminate()
        for process in self.processes:
            process.wait(START_S)

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
def broken() -> Iterator[int]:
    """Return the port of a broken replica."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), BrokenReplica) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def proxy(replica: Replica, broken: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    running = Proxy(tmp_path_factory.mktemp("proxy") / "p", replica, broken)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def proxy_on_aws(replica: Replica, broken: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    running = Proxy(tmp_path_factory.mktemp("proxy") / "p", replica, broken, SERVE_BEHIND_LOAD_BALANCER="1")
    yield running
    running.stop()


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """Return a stack for thousands of connections, which it closes at the end of the test."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with ExitStack() as stack:
        yield stack
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


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
        "half a message": [b"POST /app/v1/messages HTTP/1.1", *post[1:], b"Content-Length: 100", b"", b'{"model":'],
        "half a chunk": [*post, b"Transfer-Encoding: chunked", b"", b"10", b'{"model":'],
    }
    before = replica.requests
    with ThreadPoolExecutor(len(partial)) as clients:
        answers = dict(zip(partial, clients.map(lambda lines: proxy.send_raw(*lines), partial.values()), strict=True))
    assert {what: seconds for what, (seconds, _) in answers.items() if seconds > OPEN_S} == {}
    assert replica.requests == before
    for what in ("half a body", "half a message", "half a chunk"):
        head, _, body = answers[what][1].partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        found = json.loads(body)
        assert found.get("type") == ("error" if what == "half a message" else None)
        assert found["error"].get("code") == (None if what == "half a message" else "timeout")


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
    http.support_http_1_0()
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


# ---------------------------------------------------------------- reloads


def test_a_stream_outlives_reloads(proxy: Proxy, replica: Replica) -> None:
    replica.resume.clear()
    with proxy.client.stream("GET", "/app/stream") as answer:
        chunks = answer.iter_text()
        assert next(chunks) == "first"
        first = proxy.process
        for _ in range(2):
            proxy.reload()
        assert httpx2.get(f"http://127.0.0.1:{proxy.port}/app/").is_success  # the new process answers
        assert first in proxy.running()
        replica.resume.set()
        assert "".join(chunks) == "last"
    proxy.client.get("/app/")  # ends the old process, which waits for one more request on this connection
    wait_for(lambda: first not in proxy.running())


def test_an_old_process_may_finish_the_longest_request(proxy: Proxy) -> None:
    """Ray reads both values only when its processes start, so they must suffice for all settings."""
    longest_s = max(each.le for each in ServeOptions.model_fields["request_timeout_s"].metadata if hasattr(each, "le"))
    [hard_stop_s] = re.findall(r"^ *hard-stop-after (\d+)s$", proxy.config.read_text(), re.MULTILINE)
    assert longest_s < int(hard_stop_s) < RAY_SERVE_PORT_QUARANTINE_S


def test_old_processes_do_not_pile_up(tmp_path: Path) -> None:
    """The processes here are not HAProxy's, which would take a minute to start."""
    config = tmp_path / "node" / "haproxy.cfg"
    config.parent.mkdir()
    config.touch()
    newest, *oldest_first = olds = [subprocess.Popen(["sleep", f"{START_S}"]) for _ in range(53)]
    variables = os.environ | haproxy.variables(str(tmp_path)) | {"HAPROXY": "/bin/true"}
    command = [variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config), "-dR"]
    pids = [str(each.pid) for each in olds]
    subprocess.run([*command, "-sf", *pids, "-x", "socket"], env=variables, check=True)
    ended = oldest_first[:3]
    assert [each.wait(START_S) for each in ended] == [-signal.SIGTERM] * 3
    kept = [newest, *oldest_first[3:]]
    assert [each.poll() for each in kept] == [None] * 50
    subprocess.run([*command, "-sf", *(str(each.pid) for each in kept), "-x", "socket"], env=variables, check=True)
    assert [each.poll() for each in kept] == [None] * 50
    for each in kept:
        each.kill()
        each.wait(START_S)


# ---------------------------------------------------------------- connections


def get(path: str, *headers: str) -> bytes:
    """Return a request."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def hold(held: ExitStack, proxy: Proxy, address: str, request: bytes) -> socket.socket:
    """Connect from one of this machine's loopback addresses, send a request, and keep the connection open."""
    connection = held.enter_context(socket.socket())
    connection.settimeout(START_S)
    connection.bind((address, 0))
    with suppress(OSError):  # HAProxy may refuse the connection
        connection.connect(("127.0.0.1", proxy.port))
        connection.sendall(request)
    return connection


def ask(proxy: Proxy, address: str, path: str) -> httpx2.Response:
    """Send a request on a new connection from one of this machine's loopback addresses."""
    transport = httpx2.HTTPTransport(local_address=address)
    with httpx2.Client(transport=transport, timeout=ANSWER_S) as client:
        return client.get(f"http://127.0.0.1:{proxy.port}{path}")


def status_of(connection: socket.socket) -> int:
    """Return the status of the response on a connection, or 0 if HAProxy refused the connection."""
    try:
        return int(connection.recv(2**16).split()[1])
    except (OSError, IndexError):
        return 0


def test_one_address_cannot_take_all_connections(proxy: Proxy, held: ExitStack) -> None:
    """Half of the connections are kept after an error without a key, the others send nothing."""

    def flood() -> None:
        for _ in range(5000):
            hold(held, proxy, "127.0.0.1", get("/app/denied"))
            hold(held, proxy, "127.0.0.1", b"")

    with ThreadPoolExecutor(1) as attacker:
        flooding, answers = attacker.submit(flood), 0
        while not flooding.done() or answers < 20:
            for path in ("/app/v1/models", "/app/health"):
                assert ask(proxy, "127.0.0.2", path).is_success
                answers += 1
        flooding.result()


def test_no_address_can_take_many_connections(proxy: Proxy, held: ExitStack) -> None:
    """All addresses but 127.0.0.1, where SSH tunnels end, have the same limit."""
    open_ = [hold(held, proxy, "127.0.0.3", get("/app/")) for _ in range(520)]
    answers = Counter(map(status_of, open_))
    assert answers == {200: 512, 0: 8}
    assert ask(proxy, "127.0.0.4", "/app/").is_success


def test_many_clients_share_the_address_of_the_load_balancer(
    proxy_on_aws: Proxy, replica: Replica, held: ExitStack
) -> None:
    """The load balancer appends the client's address. What stands before that comes from the client."""
    replica.resume.clear()
    held.callback(replica.resume.set)

    def stream(client: str, number: int = 0) -> socket.socket:
        request = get("/app/stream", f"X-Forwarded-For: 10.9.{number // 256}.{number % 256}, {client}")
        return hold(held, proxy_on_aws, "127.0.0.3", request)

    many = [stream(f"198.51.100.{client}") for client in range(200) for _ in range(3)]
    greedy = [stream("203.0.113.9", number) for number in range(520)]
    network = [stream(f"2001:db8::{number}") for number in range(1, 4)]
    assert {status_of(each) for each in [*many, *network]} == {200}
    assert Counter(map(status_of, greedy)) == {200: 512, 429: 8}
    assert ask(proxy_on_aws, "127.0.0.3", "/app/health").is_success  # as the load balancer's health check
    table = asyncio.run(proxy_on_aws.writer._send_socket_command("show table http_frontend"))
    assert re.findall(r"key=2001:\S+ .*conn_cur=(\d+)", table) == ["3"]


def test_health_checks_are_answered_when_all_connections_are_taken(proxy_on_aws: Proxy, held: ExitStack) -> None:
    for _ in range(3600):  # each is answered before the next connects, because HAProxy closes those above its limit
        assert status_of(hold(held, proxy_on_aws, "127.0.0.3", get("/-/healthz"))) == 200
    answer = ask(proxy_on_aws, "127.0.0.4", "/app/v1/models")
    assert error(answer, 503)
    assert (answer.headers["retry-after"], answer.headers["connection"]) == ("5", "close")
    assert ask(proxy_on_aws, "127.0.0.4", "/app/health").is_success
    held.close()
    wait_for(lambda: ask(proxy_on_aws, "127.0.0.4", "/app/v1/models").is_success)


def test_an_error_without_a_key_closes_the_connection(proxy: Proxy) -> None:
    closed = {}
    for path in ("/app/", "/app/limited", "/app/full", "/app/denied", "/absent", "/gone/"):
        # a connection of its own, because HAProxy may close an idle one while this test waits for a CPU
        answer = httpx2.get(f"http://127.0.0.1:{proxy.port}{path}", timeout=START_S)
        closed[path, answer.status_code] = answer.headers.get("connection") == "close"
    assert {case for case, is_closed in closed.items() if is_closed} == {("/app/denied", 401), ("/absent", 404)}
    seconds, answer = proxy.send_raw(get("/app/denied"))
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert seconds < OPEN_S


def test_http_2_is_refused(proxy: Proxy) -> None:
    """Its connections carry many requests at once, and have no `Connection: close`."""
    settings_frame = bytes(3) + b"\4" + bytes(5)
    _, answer = proxy.send_raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings_frame)
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_the_load_balancer_closes_idle_connections_first() -> None:
    stack = (settings.PROJECT / "cluster" / "stack.yaml").read_text(encoding="utf-8")
    [idle_s] = re.findall(r'idle_timeout.timeout_seconds, Value: "(\d+)"', stack)
    configuration = Path(haproxy.__file__).with_name("haproxy_frontend.cfg").read_text(encoding="utf-8")
    [behind_load_balancer_s, _] = re.findall(r"timeout http-keep-alive (\d+)s", configuration)
    assert int(idle_s) < int(behind_load_balancer_s)


# ---------------------------------------------------------------- errors


def test_haproxys_own_errors_have_openais_format(proxy: Proxy) -> None:
    assert error(proxy.client.get("/absent"), 404)["code"] == "not_found"
    for path in ("/gone/v1/models", "/routed/v1/completions", "/broken/v1/completions"):
        answer = proxy.client.post(path, json={})
        assert error(answer, 503)["message"]
        assert answer.headers["retry-after"] == "5"


def test_errors_for_the_messages_api_have_anthropics_format(proxy: Proxy) -> None:
    path = "/app/v1/messages"
    types = {}
    for answer in (
        proxy.client.post(path, headers={"X-Request-Id": "a b"}, json={}),
        proxy.client.post("/absent/v1/messages/count_tokens", json={}),
        proxy.client.post("/gone/v1/messages", json={}),
        proxy.client.post("/routed/v1/messages", json={}),
        proxy.client.get("/app/none/v1/messages"),  # from Serve's proxy
    ):
        assert answer.headers["content-type"] == "application/json"
        body = answer.json()
        assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})
        types[answer.status_code] = body["error"]["type"]
    assert types == {400: "invalid_request_error", 404: "not_found_error", 503: "overloaded_error"}
    assert set(proxy.client.get("/gone/").json()) == {"error"}  # on the same connection


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
