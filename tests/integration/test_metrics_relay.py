"""Test the relay for metrics on the head: it answers only with the token, and connects only to Ray's own metrics."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from raymill import settings

TOKEN = "the-token"


class Node(BaseHTTPRequestHandler):
    """A node that serves metrics."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(f"metrics of {self.path}".encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def node() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Node) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def relay(tmp_path: Path, node: str) -> Iterator[Path]:
    """Yield the socket of a relay that knows one node."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
    targets = tmp_path / "targets.json"
    targets.write_text(json.dumps([{"labels": {}, "targets": [node, "127.0.0.1:9"]}]))
    code = "import sys; from pathlib import Path; from raymill.node import activity, metrics_relay; activity.TARGETS = "
    code += f"Path({str(targets)!r}); metrics_relay.relay(Path(sys.argv[1]))"
    path = tmp_path / "socket"
    command = [sys.executable, "-c", code, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    variables = os.environ | {"HOME": str(tmp_path)}
    with subprocess.Popen(command, cwd=settings.PROJECT, env=variables, **pipes) as process:
        assert process.stdout
        assert process.stdout.readline().strip() == TOKEN
        yield path
        assert process.stdin
        process.stdin.close()
        assert process.wait(30) == 0
    assert not path.exists(), "the relay must end with its connection"


def ask(relay: Path, path: str, token: str = TOKEN) -> tuple[int, str]:
    connection = http.client.HTTPConnection("head")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(relay))
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_metrics_of_a_node_are_relayed(relay: Path, node: str) -> None:
    assert ask(relay, f"/{node}") == (200, "metrics of /metrics")


def test_without_the_token_nothing_is_relayed(relay: Path, node: str) -> None:
    status, text = ask(relay, f"/{node}", "guessed")
    assert status == 401
    assert "metrics of" not in text


@pytest.mark.parametrize("path", ["/169.254.169.254:80", "/127.0.0.1:8265", "/", "/{node}/../secrets"])
def test_only_rays_metrics_are_reached(relay: Path, node: str, path: str) -> None:
    status, text = ask(relay, path.format(node=node))
    assert status == 404
    assert "metrics of" not in text


def test_a_node_that_does_not_answer_is_an_error_of_its_own(relay: Path, node: str) -> None:
    assert ask(relay, "/127.0.0.1:9")[0] == 502
    assert ask(relay, f"/{node}")[0] == 200


def test_only_its_user_may_open_the_socket(relay: Path) -> None:
    assert relay.stat().st_mode & 0o077 == 0
