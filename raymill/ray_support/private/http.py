"""uvicorn in every HTTP server of Ray Serve, in replicas and Serve's own proxy: HTTP/1.0, and no trailers."""

from uvicorn.protocols.http import auto, httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class _Cycle(RequestResponseCycle):
    """A request and its answer. An answer without a length ends with the connection, as in HTTP/1.0.

    uvicorn sends such answers in chunks, whose sizes a client of HTTP/1.0 takes for a part of the answer.
    """

    ends_with_connection = False

    async def send(self, message: dict) -> None:  # type: ignore[override]
        if message["type"] == "http.response.start" and self.scope["http_version"] == "1.0":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                self.ends_with_connection = True
                self.chunked_encoding = False
                self.keep_alive = False
        elif self.ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)  # type: ignore[arg-type]


def support_http_1_0() -> None:
    """Make the HTTP servers of this process support HTTP/1.0.

    Relies on `uvicorn.protocols.http.httptools_impl.RequestResponseCycle`, which uvicorn looks up for each request, and
    on its `send` and its attributes `scope`, `chunked_encoding`, `keep_alive` and `expected_content_length`
    (uvicorn 0.54).
    """
    httptools_impl.RequestResponseCycle = _Cycle  # type: ignore[misc]


class HttpProtocol(HttpToolsProtocol):
    """Drops the fields that follow a chunked body.

    uvicorn appends them to the request's headers, where they bypass HAProxy's filters and may change the headers of a
    request that has already been checked.

    Relies on `on_message_begin`, `on_headers_complete` and `on_header`, which httptools also calls for trailers
    (uvicorn 0.54, httptools 0.9).
    """

    def on_message_begin(self) -> None:
        """Start to read the headers of the next request."""
        super().on_message_begin()
        self._reads_headers = True

    def on_headers_complete(self) -> None:
        """Start the request. What follows is its body."""
        self._reads_headers = False
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, but not a trailer."""
        if self._reads_headers:
            super().on_header(name, value)


def drop_trailers() -> None:
    """Make the HTTP servers that this process starts drop trailers.

    Serve calls this in replicas and proxies before they start their server, if
    `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this function (Ray 2.60). Relies on
    `uvicorn.protocols.http.auto.AutoHTTPProtocol`, which uvicorn imports when a server starts.
    """
    auto.AutoHTTPProtocol = HttpProtocol
