"""Puts the latency and the speed of real S3 in front of moto."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moto.server import ThreadedMotoServer

LATENCY_S = 0.05
BYTES_PER_S = 90e6
"""Speed of one request: 85 to 90 MB/s, says the page "Performance design patterns for Amazon S3" of its user guide."""
SLICE = 2**20
OWN_HEADERS = {"connection", "date", "expect", "server"}


@contextmanager
def serving() -> Iterator[str]:
    """Yield the URL of an empty S3. Upload with boto3, because it does not read the chunked requests of Arrow."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's server logs each request
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    front = _Front(moto.get_host_and_port())
    threading.Thread(target=front.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{front.server_port}"
    front.shutdown()
    moto.stop()


class _Front(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, s3: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._s3 = s3
        self._contents: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def forward(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[HTTPResponse, bytes]:
        """Return moto's answer and its body."""
        connection = HTTPConnection(*self._s3)
        kept = {name: value for name, value in headers.items() if name.lower() not in OWN_HEADERS}
        connection.request(method, path, body, kept)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer, content

    def content(self, path: str, headers: dict[str, str]) -> bytes:
        """Return an object. It is kept, because moto would read all of it again for each range."""
        with self._lock:
            if path not in self._contents:
                self._contents[path] = self.forward("GET", path, b"", headers)[1]
            return self._contents[path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Front  # type: ignore[assignment]

    def do_GET(self) -> None:
        time.sleep(LATENCY_S)
        if "Range" in self.headers:
            self._send_range()
        else:
            self._forward()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(len(body) / BYTES_PER_S)
        answer, content = self.server.forward(self.command, self.path, body, dict(self.headers))
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in OWN_HEADERS:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _send_range(self) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() != "range"}
        content = self.server.content(self.path, headers)
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        wanted = memoryview(content)[int(first) : int(last or len(content)) + 1]
        self.send_response_only(206)
        self.send_header("ETag", '"the-only-version"')  # the AWS CRT, which Run:ai's streamer uses, requires one
        self.send_header("Content-Length", str(len(wanted)))
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(wanted) - 1}/{len(content)}")
        self.end_headers()
        started = time.monotonic()
        for start in range(0, len(wanted), SLICE):
            self.wfile.write(wanted[start : start + SLICE])
            time.sleep(max(0.0, started + (start + SLICE) / BYTES_PER_S - time.monotonic()))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
