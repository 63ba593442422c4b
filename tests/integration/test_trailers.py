"""Test that no HTTP server of Ray Serve turns trailers, the fields after a chunked body, into headers."""

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
import ray
import uvicorn
from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http import auto

from raymill.network import free_ports
from raymill.ray_support.private import http
from raymill.ray_support.private import serve as private_serve
from raymill.serving import haproxy
from raymill.serving.api_middleware import ApiMiddleware
from raymill.serving.keys import ApiKeys
from raymill.serving.rate_limits import RequestLimits

pytestmark = pytest.mark.skipif(not haproxy.variables("/"), reason="HAProxy is installed on Linux only")

TIMEOUT_S = 60
PAUSE_S = 0.2  # long enough for the start of a request to arrive in a segment of its own
TRAILERS = {
    "authorization": "Bearer another-key",
    "connection": "upgrade",
    "expect": "100-continue",
    "serve_multiplexed_model_id": "another",
    "upgrade": "websocket",
    "x-request-disconnect-disabled": "?1",
    "x-request-id": "\xff",
    "x-request-timeout-seconds": "0.001",
}
SENT = {"host": "localhost", "x-mine": "kept"}
"""Headers of the request that must arrive."""


def echo() -> ASGIApp:
    """Return an app that answers with the request's headers, as they are some time after the end of the body.

    It is a closure, because Ray pickles closures by value, and replicas cannot import this module.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        import asyncio
        import json

        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(0.5)
        seen = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        body = json.dumps(seen).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


@contextmanager
def run_uvicorn(app: ASGIApp) -> Iterator[int]:
    """Start a uvicorn server as Serve starts its servers, and return its port."""
    [port] = free_ports(1)
    original = auto.AutoHTTPProtocol
    http.drop_trailers()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port
    server.should_exit = True
    thread.join()
    auto.AutoHTTPProtocol = original


@pytest.fixture(scope="module")
def uvicorn_port() -> Iterator[int]:
    with run_uvicorn(echo()) as port:
        yield port


@pytest.fixture(scope="module")
def serve_ports(ray_session: None) -> Iterator[dict[str, int]]:
    """Return the ports of HAProxy, of a replica, and of Serve's own proxy."""
    [port] = free_ports(1)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    asgi_app = echo()

    class Echo:
        async def __serve_build_asgi_app__(self) -> ASGIApp:
            return asgi_app

        def port(self) -> int:
            return private_serve.own_http_server().config.port

    app = serve.deployment(serve.ingress()(Echo), ray_actor_options={"num_cpus": 0.1})
    handle = serve.run(app.bind(), name="trailers", route_prefix="/trailers")
    fallback = int(os.environ["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"])
    yield {"HAProxy": port, "replica": handle.port.remote().result(timeout_s=TIMEOUT_S), "Serve's proxy": fallback}
    serve.shutdown()


def send(port: int, path: str, *, in_one_segment: bool) -> dict[str, str]:
    """Send a chunked request with trailers, and return the headers that the app sees."""
    head = "".join(f"{name}: {value}\r\n" for name, value in SENT.items())
    start = f"POST {path} HTTP/1.1\r\n{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n"
    end = "".join(f"{name}: {value}\r\n" for name, value in TRAILERS.items()) + "\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as client:
        if in_one_segment:
            client.sendall((start + end).encode("latin-1"))
        else:
            client.sendall(start.encode("latin-1"))
            time.sleep(PAUSE_S)
            client.sendall(end.encode("latin-1"))
        return read_seen(client.makefile("rb"))


def read_seen(connection: BinaryIO) -> dict[str, str]:
    """Return the headers that the app saw, from its next response."""
    assert b" 200 " in connection.readline()
    size = 0
    while line := connection.readline().strip():
        if line.lower().startswith(b"content-length: "):
            size = int(line.split()[1])
    return json.loads(connection.read(size))


def check(headers: dict[str, str]) -> None:
    assert headers.items() >= SENT.items()
    generated = {"x-request-id", "x-request-disconnect-disabled"}  # HAProxy and Serve's proxy add their own
    assert not headers.keys() & (TRAILERS.keys() - generated)
    assert not headers.items() & (TRAILERS.items() - {("x-request-disconnect-disabled", "?1")})


@pytest.mark.parametrize("in_one_segment", [True, False])
def test_uvicorn_drops_trailers(uvicorn_port: int, in_one_segment: bool) -> None:
    headers = send(uvicorn_port, "/", in_one_segment=in_one_segment)
    assert headers == SENT | {"transfer-encoding": "chunked"}


def test_headers_of_the_next_request_are_read(uvicorn_port: int) -> None:
    """Two requests arrive at once. The trailer of the first is dropped, and the headers of the second are not."""
    first = b"POST / HTTP/1.1\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-B: 2\r\n\r\n"
    second = b"POST / HTTP/1.1\r\nX-C: 3\r\nContent-Length: 0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", uvicorn_port), timeout=TIMEOUT_S) as client:
        client.sendall(first + second)
        connection = client.makefile("rb")
        seen = [read_seen(connection) for _ in range(2)]
    assert seen == [{"x-a": "1", "transfer-encoding": "chunked"}, {"x-c": "3", "content-length": "0"}]


def test_a_key_in_a_trailer_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ".env"
    digest = hashlib.sha256(b"restricted").hexdigest()
    file.write_text(f"SERVE_API_KEY=the-owner\nSERVE_API_KEYS=restricted:sha256={digest}:models=another\n")
    monkeypatch.setenv("SECRETS_FILE", str(file))
    monkeypatch.delenv("SECRETS_PREFIX", raising=False)
    owner, restricted = (f"Authorization: Bearer {key}\r\n" for key in ("the-owner", "restricted"))

    def status(port: int, header: str, trailer: str) -> int:
        body = '{"model": "secret"}'
        head = f"POST / HTTP/1.1\r\n{header}Transfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as client:
            client.sendall(f"{head}{len(body):x}\r\n{body}\r\n0\r\n{trailer}\r\n".encode())
            return int(client.recv(2**16).split()[1])

    limits = RequestLimits(per_minute=100, at_once=100, max_body=1000, timeout_s=TIMEOUT_S)
    with run_uvicorn(ApiMiddleware(echo(), ApiKeys(), limits)) as port:
        assert status(port, owner, "") == 200
        assert status(port, "", owner) == 401
        assert status(port, restricted, owner) == 404


@pytest.mark.parametrize("in_one_segment", [True, False])
@pytest.mark.parametrize("server", ["HAProxy", "replica", "Serve's proxy"])
def test_serve_drops_trailers(serve_ports: dict[str, int], server: str, in_one_segment: bool) -> None:
    assert ray.is_initialized()
    check(send(serve_ports[server], "/trailers/", in_one_segment=in_one_segment))
