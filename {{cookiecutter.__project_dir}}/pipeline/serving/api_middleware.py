"""Middleware in front of a model's HTTP API: keys, limits, sizes, timeouts, and errors in OpenAI's shape."""

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.serving.app_call import AppCall
from pipeline.serving.body import Body, InvalidBody, inspect
from pipeline.serving.keys import Keys
from pipeline.serving.limits import Limits, QueueFull, RequestLimits, Slots

KEPT = (b"allow", b"retry-after")  # headers of an error that tell a client what to do
OPEN_ROUTE = "/health"  # for load balancers: says whether the engine lives, and nothing else
NO_BOUND = 100_000  # turns off Ray's limit of requests per replica, which counts /health and unfinished uploads too
QUEUE_RETRY_S = 1
DEAD_RETRY_S = 5  # other replicas can answer at once; a new one takes longer, but clients back off exponentially
CLOSE = {"Connection": "close"}
DEAD_HEADERS = CLOSE | {"Retry-After": str(DEAD_RETRY_S)}  # closed, so that HAProxy does not reuse the connection
# Rejected bodies are still read, up to this multiple of the limit. Otherwise a client that is still sending sees a
# broken connection instead of the answer.
DISCARDED = 4
DEAD = "the engine of this replica has failed and is being replaced: try again in a few seconds"


class Rejected(Exception):
    """A request that is answered with this error instead of reaching the app."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class HungUp(Exception):
    """The client disconnected before its request was read."""


def _always() -> bool:
    return True


class ApiMiddleware:
    """ASGI middleware that admits requests with a valid key, within the limits of that key."""

    def __init__(self, app: ASGIApp, keys: Keys, rules: RequestLimits, alive: Callable[[], bool] = _always) -> None:
        """`alive` returns whether the app's engine is alive."""
        self.app = app
        self._keys = keys
        self._rules = rules
        self._alive = alive
        self._limits = Limits(rules.per_minute, rules.at_once)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket: no route of ours is one
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = Answer(send, self._alive)
        if scope["path"].removeprefix(scope.get("root_path", "")) == OPEN_ROUTE:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server drops the body
            await self.app({**scope, "method": method}, receive, answer)
            return
        try:
            async with asyncio.timeout(self._rules.timeout_s):
                await self._let_in(scope, receive, answer)
        except Rejected as error:
            await answer.refuse(error.status, error.message, error.param, code=error.code, headers=error.headers)
        except TimeoutError:
            if answer.begun:
                raise  # cut off: the end of a stream must not look like the end of an answer
            message = f"not answered within {self._rules.timeout_s:g} s: ask for fewer tokens"
            await Answer(send).refuse(504, message, code="timeout")
        except HungUp:
            pass

    async def _let_in(self, scope: Scope, receive: Receive, answer: "Answer") -> None:
        """Pass a request to the app, and release its key's share when the app has finished."""
        with ExitStack() as held:
            body, scope = await self._admit(scope, receive, held)
            call = AppCall(self.app, scope, body, receive, answer, answer.close)
            everything = held.pop_all()

        def free(task: asyncio.Future[None]) -> None:
            everything.close()
            task.cancelled() or task.exception()  # asyncio logs exceptions that are never retrieved

        call.task.add_done_callback(free)
        await call.wait()

    async def _admit(self, scope: Scope, receive: Receive, held: ExitStack) -> tuple[bytes, Scope]:
        """Return the body of a request that is within its key's limits, and the scope with what the body asks for."""
        headers = dict(scope["headers"])
        try:
            name = self._name(headers)
            self._charge(name, 1, held)  # an unfinished body counts, too
        except Rejected as error:
            _, is_whole = await self._read(headers, receive, keep=False)
            error.headers |= {} if is_whole else CLOSE
            raise
        body, is_whole = await self._read(headers, receive)
        if body is None:
            message = f"the request is larger than {self._rules.max_body:,} bytes: send less at a time"
            raise Rejected(413, message, **({} if is_whole else CLOSE))
        if scope["method"] != "POST":
            return body, scope
        asked = _inspected(body)
        self._check(asked.sequences)
        self._charge(name, asked.sequences - 1, held)
        return asked.raw, {**scope, "state": {**scope.get("state", {}), "body": asked}}

    def _name(self, headers: dict[bytes, bytes]) -> str:
        """Return the name of the request's key."""
        if name := self._keys.name_of(headers.get(b"authorization", b"")):
            return name
        message = "a valid API key is required: send the header `Authorization: Bearer YOUR_KEY`"
        raise Rejected(401, message, code="invalid_api_key", WWW_Authenticate="Bearer")

    def _charge(self, name: str, count: int, held: ExitStack) -> None:
        """Count sequences against the key's limits until `held` closes."""
        if wait_s := self._limits.begin(name, count):
            message = f"rate limit exceeded for key {name}: retry in {wait_s} s"
            raise Rejected(429, message, code="rate_limit_exceeded", Retry_After=str(wait_s))
        held.callback(self._limits.end, name, count)

    async def _read(
        self, headers: dict[bytes, bytes], receive: Receive, *, keep: bool = True
    ) -> tuple[bytes | None, bool]:
        """Return the body, or None if it is too large or not to be kept, and whether it was read to its end."""
        limit, timeout_s = self._rules.max_body, self._rules.body_timeout_s
        if int(headers.get(b"content-length", b"0")) > DISCARDED * limit:  # always a number: the server has checked it
            return None, False
        pieces, size, more = [], 0, True
        try:
            async with asyncio.timeout(timeout_s):
                while more and size <= DISCARDED * limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HungUp
                    more = message.get("more_body", False)
                    size += len(message.get("body", b""))
                    if keep and size <= limit:
                        pieces.append(message.get("body", b""))
        except TimeoutError:
            text = f"the request's body did not arrive within {timeout_s:g} s: send it faster, or less at a time"
            raise Rejected(408, text, code="timeout", **CLOSE) from None
        return b"".join(pieces) if keep and size <= limit else None, not more

    def _check(self, sequences: int) -> None:
        if sequences > (most := self._rules.max_sequences):
            message = f"prompts times n is {sequences:,}, more than {most}: ask for fewer"
            raise Rejected(400, message, code="too_many_sequences")


class Queued:
    """ASGI middleware behind `ApiMiddleware` that bounds the sequences a replica works on. Further requests queue.

    It is behind the fork: a request that another replica answers takes no slot of this one.
    """

    def __init__(self, app: ASGIApp, rules: RequestLimits, alive: Callable[[], bool] = _always) -> None:
        """`alive` returns whether the app's engine is alive."""
        self.app = app
        self._slots = Slots(rules.slots, rules.max_waiting)
        self._alive = alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope.get("state", {}).get("body")
        if asked is None:  # it asks the engine for nothing
            await self.app(scope, receive, send)
            return
        if not self._alive():
            raise Rejected(503, DEAD, code="engine_dead", **DEAD_HEADERS)
        try:
            await self._slots.take(asked.sequences)
        except QueueFull:
            message = "the server's queue is full: try again in a moment"
            raise Rejected(503, message, code="overloaded", Retry_After=str(QUEUE_RETRY_S)) from None
        try:
            await self.app(scope, receive, send)
        finally:
            self._slots.give(asked.sequences)


class Answer:
    """Passes the app's answer on. Errors get OpenAI's shape.

    https://platform.openai.com/docs/guides/error-codes
    """

    def __init__(self, send: Send, alive: Callable[[], bool] = _always) -> None:
        self._client = send
        self._send: Send = self._begin
        self._alive = alive
        self._error: Message | None = None  # the start of one, held back until its body is whole
        self._body = b""
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._error = message
        elif self._error is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            status = self._error["status"]
            if status >= 500 and not self._alive():
                await self.refuse(503, DEAD, code="engine_dead", headers=DEAD_HEADERS)
            else:
                headers = {name.decode(): value.decode() for name, value in self._error["headers"] if name in KEPT}
                words, param, code = _words(status, self._body)
                await self.refuse(status, words, param, code=code, headers=headers)

    async def _begin(self, message: Message) -> None:
        self.begun = True
        self._send = self._client
        await self._client(message)

    def close(self) -> None:
        """Drop everything that the app sends from now on."""
        self._send = _drop

    async def refuse(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Answer with an error; `param` is what of the request it is about."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        code = code or ("not_found" if status == 404 else None)
        body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        # as ASCII: a message may repeat input that is not valid Unicode
        answer = Response(json.dumps(body), status, headers, "application/json")
        await answer({"type": "http"}, _nothing, self._send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _drop(message: Message) -> None:
    if message["type"] == "http.response.start":
        raise OSError("the client has hung up, or its time is up")
    # do not raise for a chunk: the stream must get to its next chunk, where cancellation stops the engine


def _inspected(body: bytes) -> Body:
    try:
        return inspect(body)
    except InvalidBody as error:
        raise Rejected(error.status, error.message, param=error.param, code=error.code) from None


def _words(status: int, body: bytes) -> tuple[str, str | None, str | None]:
    """Return message, parameter and code of an error from the engine, FastAPI or another app."""
    if status == 500:  # what went wrong inside is for the log
        return "the server failed on this request; its log has the reason", None, None
    try:
        found: Any = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found))
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        code = found.get("code")  # vLLM repeats the status here, as a number
        return found["message"], found.get("param"), code if isinstance(code, str) else None
    return found if isinstance(found, str) and found else f"HTTP status {status}", None, None
