"""Serves the metrics of all nodes through a socket on the head, to callers that have the cluster's token.

`inv metrics` starts it over ssh and forwards requests to the socket. Prometheus on the user's machine cannot reach the
nodes itself. A SOCKS proxy would let every user of that machine reach what the head can reach, which includes the
credentials of its role.
"""

import hmac
import json
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

from raymill.node import activity, ray_jobs

TIMEOUT_S = 10


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /HOST:PORT with the metrics that Ray serves there."""

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {ray_jobs.TOKEN_FILE.read_text().strip()}".encode()):
            self.send_error(401)
        elif (target := self.path.removeprefix("/")) not in _targets():
            self.send_error(404, "Ray serves no metrics there")
        else:
            self._send_metrics(target)

    def _send_metrics(self, target: str) -> None:
        try:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=TIMEOUT_S) as answer:
                content, kind = answer.read(), answer.headers["Content-Type"]
        except OSError as error:
            self.send_error(502, str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def address_string(self) -> str:
        return "the socket"  # it has no addresses

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the output goes to the user's verb."""


def _targets() -> set[str]:
    """Return HOST:PORT of all metrics that Ray serves."""
    return {target for group in json.loads(activity.TARGETS.read_text()) for target in group["targets"]}


def relay(socket: Path) -> None:
    """Print the cluster's token when requests can come, and answer them until stdin is closed."""
    with _Server(str(socket), _Handler) as server:
        socket.chmod(0o600)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(ray_jobs.TOKEN_FILE.read_text().strip(), flush=True)
        sys.stdin.read()
    socket.unlink()


if __name__ == "__main__":
    relay(Path(sys.argv[1]))
