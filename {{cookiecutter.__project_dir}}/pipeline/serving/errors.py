"""API errors in OpenAI's format: https://platform.openai.com/docs/guides/error-codes"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Send

FORWARDED_HEADERS = (b"allow", b"retry-after")  # headers of an app's error that tell a client what to do
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnects before the response
ENGINE_RETRY_S = 5  # other replicas can answer at once; a new one takes longer, but clients back off exponentially
CLOSE = {"Connection": "close"}


class ApiError(Exception):
    """An error that is the response to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`param` is the invalid field of the request."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or ("not_found" if status == 404 else None)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The response's body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def engine_dead() -> ApiError:
    """Return the error for requests to a replica whose engine has died. It closes HAProxy's connection."""
    message = "the engine of this replica failed and is being replaced; try again in a few seconds"
    return ApiError(503, message, code="engine_dead", headers=CLOSE | {"Retry-After": str(ENGINE_RETRY_S)})


def always_alive() -> bool:
    """Return True. Apps without an engine use this function as `alive`."""
    return True


async def no_request() -> Message:
    """Return a disconnect. Use this as `receive` when a response is sent without reading the request."""
    return {"type": "http.disconnect"}


class ResponseSender:
    """An ASGI `send` that passes an app's responses to the client, and converts errors to OpenAI's format."""

    def __init__(self, send: Send, alive: Callable[[], bool] = always_alive) -> None:
        """`alive` returns whether the app's engine is alive."""
        self._client = send
        self._send: Send = self._send_first
        self._alive = alive
        self._error_start: Message | None = None  # held back until the error's body is complete
        self._error_body = b""
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._error_start = message
        elif self._error_start is None:
            await self._send(message)
        else:
            self._error_body += message.get("body", b"")
            if not message.get("more_body"):
                await self.send_error(self._convert(self._error_start))

    async def send_error(self, error: ApiError) -> None:
        """Send an error response."""
        # escape all but ASCII, because a message may quote input that is not valid Unicode
        response = Response(json.dumps(error.body), error.status, error.headers, "application/json")
        await response({"type": "http"}, no_request, self._send)

    def discard(self) -> None:
        """Discard everything that the app sends from now on. Starting a response then raises OSError."""
        self._send = _discard

    async def _send_first(self, message: Message) -> None:
        self.started = True
        self._send = self._client
        await self._client(message)

    def _convert(self, start: Message) -> ApiError:
        if start["status"] >= 500 and not self._alive():
            return engine_dead()
        headers = {name.decode(): value.decode() for name, value in start["headers"] if name in FORWARDED_HEADERS}
        return _parse_error(start["status"], self._error_body, headers)


async def _discard(message: Message) -> None:
    if message["type"] == "http.response.start":
        raise OSError("the client disconnected, or the request timed out")
    # do not raise for a chunk, because cancellation stops the engine only when the stream reaches its next chunk


def _parse_error(status: int, body: bytes, headers: Mapping[str, str]) -> ApiError:
    """Parse an error response of the engine, FastAPI or another app."""
    if status == 500:  # internals belong in the log only
        return ApiError(status, "the server failed to process this request; see its log", headers=headers)
    try:
        found: Any = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found))
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        code = found.get("code")  # vLLM repeats the status here, as a number
        code = code if isinstance(code, str) else None
        return ApiError(status, found["message"], param=found.get("param"), code=code, headers=headers)
    message = found if isinstance(found, str) and found else f"HTTP status {status}"
    return ApiError(status, message, headers=headers)
