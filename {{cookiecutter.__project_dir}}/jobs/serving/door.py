"""What stands before a model's HTTP API: keys, limits, sizes, time, and errors in OpenAI's shape."""

import asyncio
import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.serving.keys import Keys
from jobs.serving.limits import Limits, Rules

KEPT = (b"allow", b"retry-after")  # headers of an error that tell a client what to do
OPEN_ROUTE = "/health"  # for load balancers: says whether the engine lives, and nothing else


class Door:
    """ASGI middleware that lets requests with a key through, as many and as large as they may be."""

    def __init__(self, app: ASGIApp, keys: Keys, rules: Rules) -> None:
        self.app = app
        self._keys = keys
        self._limits = Limits(rules.per_minute, rules.at_once)
        self._max_body = rules.max_body
        self._too_large = f"the request is larger than {rules.max_body:,} bytes: send less at a time"
        self._timeout_s = rules.timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket: no route of ours is one
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = Answer(send)
        if scope["path"].removeprefix(scope.get("root_path", "")) == OPEN_ROUTE:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server leaves the body out
            await self.app({**scope, "method": method}, receive, answer)
        elif name := await self._admit(dict(scope["headers"]), answer):
            try:
                await self._pass_on(scope, receive, answer)
            finally:
                self._limits.end(name)

    async def _admit(self, headers: dict[bytes, bytes], answer: "Answer") -> str | None:
        """The name of a key that may ask now, whose request is counted from here on; None after a refusal."""
        name = self._keys.name_of(headers.get(b"authorization", b""))
        if name is None:
            message = "a valid API key is required: send the header `Authorization: Bearer YOUR_KEY`"
            await answer.refuse(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        elif int(headers.get(b"content-length", b"0")) > self._max_body:  # a number: the server has parsed it
            await answer.refuse(413, self._too_large)
        elif wait_s := self._limits.begin(name):
            message = f"the key {name} has asked for as much as it may: try again after {wait_s} s"
            await answer.refuse(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(wait_s)})
        else:
            return name
        return None

    async def _pass_on(self, scope: Scope, receive: Receive, answer: "Answer") -> None:
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:  # a body without a length; one that is longer than it says never arrives
                raise HTTPException(413, self._too_large)
            return message

        try:
            async with asyncio.timeout(self._timeout_s):
                await self.app(scope, counted, answer)
        except HTTPException as error:  # of `counted`, where no app has caught it
            await answer.refuse(error.status_code, error.detail)
        except TimeoutError:
            if answer.begun:
                raise  # cut off: the end of a stream must not look like the end of an answer
            await answer.refuse(504, f"not answered within {self._timeout_s:g} s: ask for fewer tokens", code="timeout")


class Answer:
    """The way back. An error that the app answers with gets OpenAI's shape; all else passes as it is.

    https://platform.openai.com/docs/guides/error-codes
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._error: Message | None = None  # the start of one, held back until its body is whole
        self._body = b""
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._error = message
        elif self._error is None:
            self.begun = True
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                headers = {name.decode(): value.decode() for name, value in self._error["headers"] if name in KEPT}
                await self.refuse(self._error["status"], *_words(self._error["status"], self._body), headers=headers)

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
        self.begun = True
        kind = "invalid_request_error" if status < 500 else "server_error"
        code = code or ("not_found" if status == 404 else None)
        body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        await JSONResponse(body, status, headers)({"type": "http"}, _nothing, self._send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _words(status: int, body: bytes) -> tuple[str, str | None]:
    """What an error of the engine's or of FastAPI's says, and what of the request it is about."""
    if status == 500:  # what went wrong inside is for the log
        return "the server failed on this request; its log has the reason", None
    try:
        found: Any = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found))
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        return found["message"], found.get("param")
    return found if isinstance(found, str) and found else f"HTTP status {status}", None
