"""Middleware in front of a model's HTTP API: API keys, limits per key, body size and timeouts."""

import asyncio
import hmac
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raymill.serving import hooks
from raymill.serving.accounting import RequestRecord, current, ignore
from raymill.serving.app_call import AppCall, ClientDisconnected
from raymill.serving.body_checks import inspect
from raymill.serving.errors import CLOSE, FALLBACK_HEADER, MODEL_NOT_FOUND, ApiError, ResponseSender, always_alive
from raymill.serving.keys import ApiKeys
from raymill.serving.model_router import MAX_NAME_SHOWN
from raymill.serving.rate_limits import RateLimiter, RequestLimits

HEALTH_ROUTE = "/health"  # open to load balancers without a key, because it only tells whether the engine is alive
# Rejected bodies are still read, up to this multiple of the size limit. Otherwise a client that is still sending sees
# a broken connection instead of the error.
MAX_DISCARDED_BODIES = 4


class ApiMiddleware:
    """ASGI middleware that admits requests with a valid key, within the limits of that key."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        limits: RequestLimits,
        alive: Callable[[], bool] = always_alive,
        on_end: Callable[[RequestRecord], None] = ignore,
        *,
        model: str = "",
        checks: Sequence[hooks.Check] = (),
    ) -> None:
        """`alive` returns whether the app's engine is alive. `on_end` gets each request that had a valid key.

        `checks` are the user's own checks of bodies. `model` is the name of the model that answers requests that name
        none. If it is empty, keys for some models have to name one.
        """
        self.app = app
        self._model = model
        self._checks = checks
        self._keys = keys
        self._limits = limits
        self._alive = alive
        self._on_end = on_end
        self._rate_limiter = RateLimiter(limits.per_minute, limits.at_once, limits.tokens_per_minute)
        self._deadlines: set[asyncio.Timeout] = set()
        """Deadlines of the requests in progress."""
        self._ended_by: ApiError | None = None

    def end_requests(self, error: ApiError) -> None:
        """End the requests in progress, and answer them and all later ones with this error.

        Streams that have started are cut off, because a normal end would look like a complete answer.
        """
        self._ended_by = error
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # the API has no websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        route = f"{scope['method']} {path}"
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server omits the response's body
        if path == HEALTH_ROUTE:
            await self.app(scope, receive, ResponseSender(send, self._alive, path))
            return
        record = RequestRecord(route)
        current.set(record)
        send = self._recorded(send, record)
        response = ResponseSender(send, self._alive, path)
        try:
            async with asyncio.timeout(self._limits.timeout_s) as deadline:
                if self._ended_by:
                    raise self._ended_by
                self._deadlines.add(deadline)
                try:
                    await self._handle(scope, receive, response, record)
                finally:
                    self._deadlines.discard(deadline)
        except ApiError as error:
            await response.send_error(error)
        except TimeoutError:
            if response.started:
                raise  # cut the stream off, because a normal end would look like a complete answer
            message = f"the request did not finish within {self._limits.timeout_s:g} s; ask for fewer tokens"
            late = self._ended_by or ApiError(504, message, code="timeout")
            await ResponseSender(send, path=path).send_error(late)
        except ClientDisconnected:
            pass
        finally:
            if record.key and not record.is_recorded_elsewhere:
                self._rate_limiter.add_tokens(record.key, record.prompt_tokens + record.completion_tokens)
                self._on_end(record)

    def _recorded(self, send: Send, record: RequestRecord) -> Send:
        """Return a `send` that adds headers about the limits, and records the status and the time of the first part."""

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if record.key and not record.is_forwarded:  # another app has added its own
                    headers = [*message.get("headers", ()), *self._rate_limiter.headers(record.key)]
                    message = {**message, "headers": headers}
            await send(message)
            # a stream's response starts before its first token
            if record.first_s is None and message["type"] == "http.response.body":
                record.first_s = record.elapsed_s()

        return recorded

    async def _handle(self, scope: Scope, receive: Receive, response: ResponseSender, record: RequestRecord) -> None:
        """Pass a request to the app. The request counts as in progress until the app has finished."""
        with ExitStack() as counted:
            body, scope = await self._admit(scope, receive, counted, record)
            call = AppCall(self.app, scope, body, receive, response, response.discard)
            release = counted.pop_all()

        def finish(task: asyncio.Future[None]) -> None:
            release.close()
            task.cancelled() or task.exception()  # asyncio logs exceptions that are never retrieved

        call.task.add_done_callback(finish)
        await call.wait()

    async def _admit(
        self, scope: Scope, receive: Receive, counted: ExitStack, record: RequestRecord
    ) -> tuple[bytes, Scope]:
        """Check a request's key, limits and body, and record its key and model. Return the body and the scope.

        The scope has the key in its only Authorization header. For a POST, it contains the inspected body.

        Raises:
            ApiError: the key or the body is not valid, or the request exceeds a limit.
        """
        scope = _with_authorization(scope)
        headers = dict(scope["headers"])
        try:
            key = record.key = self._authenticate(headers)
            record.has_fallback = hmac.compare_digest(headers.get(FALLBACK_HEADER, b""), self._keys.token)
            self._count(key, 1, counted)  # an upload in progress counts too
        except ApiError as error:
            _, is_complete = await self._read_body(headers, receive, keep=False)
            error.headers |= {} if is_complete else CLOSE
            raise
        body, is_complete = await self._read_body(headers, receive)
        if body is None:
            message = f"the request body is larger than {self._limits.max_body:,} bytes; send a smaller one"
            raise ApiError(413, message, headers={} if is_complete else CLOSE)
        record.body_bytes = len(body)
        if scope["method"] != "POST":
            return body, scope
        _check_encoding(headers)
        inspected = inspect(body)
        named, record.model = inspected.model, inspected.model or self._model
        inspected = inspected._replace(model=record.model)
        if not self._keys.may_use(key, record.model):
            # a key that may not use the app's own model does not learn its name
            model = f"model `{named[:MAX_NAME_SHOWN]}`, or there is no such model" if named else "the default model"
            message = f"key `{key}` may not use {model}; list the models that it may use with GET /v1/models"
            raise ApiError(404, message, code=MODEL_NOT_FOUND)
        self._check_sequences(inspected.sequences)
        if self._checks:
            request = hooks.ApiRequest(record.route, key, record.model, from_json(inspected.raw))
            await hooks.check(request, self._checks)
        self._count(key, inspected.sequences - 1, counted)
        return inspected.raw, {
            **scope,
            "state": {**scope.get("state", {}), "body": inspected, "token": self._keys.token},
        }

    def _authenticate(self, headers: dict[bytes, bytes]) -> str:
        """Return the name of the request's key."""
        if name := self._keys.name_of(headers[b"authorization"]):
            return name
        message = "a valid API key is required: send the header `Authorization: Bearer YOUR_KEY`"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _count(self, key: str, sequences: int, counted: ExitStack) -> None:
        """Count sequences against the key's limits. They are in progress until `counted` closes."""
        if wait_s := self._rate_limiter.acquire(key, sequences):
            message = f"rate limit exceeded for key `{key}`; retry in {wait_s} s"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(wait_s)})
        counted.callback(self._rate_limiter.release, key, sequences)

    async def _read_body(
        self, headers: dict[bytes, bytes], receive: Receive, *, keep: bool = True
    ) -> tuple[bytes | None, bool]:
        """Read the body. Return it, and whether all of it was read.

        Return None as the body if the body is too large or `keep` is False.
        """
        limit, timeout_s = self._limits.max_body, self._limits.body_timeout_s
        max_read = MAX_DISCARDED_BODIES * limit
        if int(headers.get(b"content-length", b"0")) > max_read:  # always a number, because the server checks it
            return None, False
        chunks, size, more = [], 0, True
        try:
            async with asyncio.timeout(timeout_s):
                while more and size <= max_read:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    more = message.get("more_body", False)
                    size += len(message.get("body", b""))
                    if keep and size <= limit:
                        chunks.append(message.get("body", b""))
        except TimeoutError:
            text = f"the request body did not arrive within {timeout_s:g} s; send it faster, or send a smaller one"
            raise ApiError(408, text, code="timeout", headers=CLOSE) from None
        return b"".join(chunks) if keep and size <= limit else None, not more

    def _check_sequences(self, sequences: int) -> None:
        if sequences > (limit := self._limits.max_sequences):
            message = f"prompts times n is {sequences:,}, more than {limit}; send fewer prompts, or lower n"
            raise ApiError(400, message, code="too_many_sequences")


def _with_authorization(scope: Scope) -> Scope:
    """Return the scope with one Authorization header. Anthropic's clients send the key as `x-api-key` instead."""
    headers = dict(scope["headers"])
    key = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
    others = [header for header in scope["headers"] if header[0] != b"authorization"]
    return {**scope, "headers": [*others, (b"authorization", key)]}


def _check_encoding(headers: dict[bytes, bytes]) -> None:
    encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip()[:MAX_NAME_SHOWN]
    if encoding.lower() not in ("", "identity"):
        message = f"the server does not read bodies with `Content-Encoding: {encoding}`; send the body uncompressed"
        raise ApiError(415, message, code="unsupported_encoding")
