"""uvicorn's HTTP protocol without trailers, for every HTTP server of Ray Serve: replicas and Serve's own proxy."""

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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
