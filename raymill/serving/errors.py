"""API errors in the formats of OpenAI and, for the Messages API, of Anthropic.

https://platform.openai.com/docs/guides/error-codes and https://docs.claude.com/en/api/errors
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Send

FORWARDED_HEADERS = (b"allow", b"retry-after")  # headers of an app's error that tell a client what to do
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnects before the response
ENGINE_RETRY_S = 5  # other replicas can answer at once; a new one takes longer, but clients back off exponentially
UNAVAILABLE = frozenset({404, 502, 503})
"""HAProxy, the app at the root path or the canary returns these statuses if the canary is gone or cannot answer. Then
the main model answers."""
FALLBACK_HEADER = b"x-fallback-token"
"""Header of the requests that the app at the root path forwards to the canary. Its value is `ApiKeys.token`."""
CLOSE = {"Connection": "close"}
NEEDS_PARSER = "--tool-call-parser to be set"  # the end of vLLM's message for tools without a parser
NO_PARSER = "the served model has no tool parser; send no tools, or set tool_parser in [serve] of settings.toml"
MODEL_NOT_FOUND = "model_not_found"  # OpenAI's code for a model that a key may not use
# parts of vLLM's messages for prompts and answers that are longer than the model allows
TOO_LONG = ("maximum context length", "cannot be greater than max_model_len")
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's code, by which clients know that they must shorten
PROMPT_TOO_LONG = "prompt is too long: "  # the same in Anthropic's API, which has no codes
VLLMS_VALUE = " (parameter="  # vLLM ends messages with the field, which is `param`, and with Python's form of its value
MESSAGES_ROUTE = "/v1/messages"
# Proxies such as nginx would hold a stream back to send it in large pieces, or cache it.
STREAM_HEADERS = {b"cache-control": b"no-cache", b"x-accel-buffering": b"no"}
MAX_MESSAGE, MAX_PARAM = 2000, 500  # maximum bytes as JSON; both may quote the request, which is as large as a body
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


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
        self.message = shortened(message, MAX_MESSAGE)
        self.param = param and shortened(param, MAX_PARAM)
        self.code = code or ("not_found" if status == 404 else None)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The response's body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The response's body in Anthropic's format."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        start = PROMPT_TOO_LONG if self.code == CONTEXT_LENGTH_EXCEEDED else ""
        return {"type": "error", "error": {"type": kind, "message": f"{start}{self.message}"}}


def shortened(text: str, limit: int) -> str:
    """Return the beginning of a text that takes at most `limit` bytes as JSON, with `…` if the text is longer."""
    kept = text[:limit]
    while len(json.dumps(kept)) > limit:
        kept = kept[: len(kept) * 3 // 4]
    return kept if kept == text else f"{kept}…"


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
    """An ASGI `send` that passes an app's responses to the client, and converts errors to the format of the API."""

    def __init__(self, send: Send, alive: Callable[[], bool] = always_alive, path: str = "") -> None:
        """`alive` returns whether the app's engine is alive. `path` is the route of the request."""
        self._client = send
        self._send: Send = self._send_first
        self._alive = alive
        self._is_anthropic = path.startswith(MESSAGES_ROUTE)
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
        body = error.anthropic_body if self._is_anthropic else error.body
        response = Response(json.dumps(body), error.status, error.headers, "application/json")
        await response({"type": "http"}, no_request, self._send)

    def discard(self) -> None:
        """Discard everything that the app sends from now on. Starting a response then raises OSError."""
        self._send = _discard

    async def _send_first(self, message: Message) -> None:
        self.started = True
        self._send = self._client
        await self._client(_with_stream_headers(message))

    def _convert(self, start: Message) -> ApiError:
        if start["status"] >= 500 and not self._alive():
            return engine_dead()
        headers = {name.decode(): value.decode() for name, value in start["headers"] if name in FORWARDED_HEADERS}
        return parse_error(start["status"], self._error_body, headers)


def _with_stream_headers(message: Message) -> Message:
    headers = dict(message.get("headers", ()))  # only a start has any
    if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        return message
    added = [header for header in STREAM_HEADERS.items() if header[0] not in headers]  # another app may have added them
    return {**message, "headers": [*message["headers"], *added]}


async def _discard(message: Message) -> None:
    if message["type"] == "http.response.start":
        raise OSError("the client disconnected, or the request timed out")
    # do not raise for a chunk, because cancellation stops the engine only when the stream reaches its next chunk


def parse_error(status: int, body: bytes, headers: Mapping[str, str]) -> ApiError:
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
        if found["message"].endswith(NEEDS_PARSER):
            return ApiError(status, NO_PARSER, param="tools", code="tools_not_supported", headers=headers)
        message, code = found["message"].partition(VLLMS_VALUE)[0], found.get("code")
        if any(part in message for part in TOO_LONG):
            message = message.replace("=max_total_tokens=", "=")
            return ApiError(status, message, code=CONTEXT_LENGTH_EXCEEDED, headers=headers)
        code = code if isinstance(code, str) else None  # vLLM repeats the status here, as a number
        return ApiError(status, message, param=found.get("param"), code=code, headers=headers)
    message = found if isinstance(found, str) and found else f"HTTP status {status}"
    return ApiError(status, message, headers=headers)
