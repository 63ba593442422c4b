"""uvicorn's answers to clients of HTTP/1.0."""

from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


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


def support() -> None:
    """Make the HTTP servers of this process support HTTP/1.0.

    Relies on `uvicorn.protocols.http.httptools_impl.RequestResponseCycle`, which uvicorn looks up for each request, and
    on its `send` and its attributes `scope`, `chunked_encoding`, `keep_alive` and `expected_content_length`
    (uvicorn 0.54).
    """
    httptools_impl.RequestResponseCycle = _Cycle  # type: ignore[misc]
