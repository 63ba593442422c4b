"""Where the way forks: requests for other models, and a canary's share, go on to the apps that serve them."""

import contextlib
import logging
import random
import time
from collections.abc import Callable
from urllib.parse import quote

import httpx2
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.serving.body import Body
from pipeline.serving.canary import RequestOutcome, Routes

NOT_HANDED_ON = {b"host", b"content-length", b"connection", b"transfer-encoding"}  # of this connection, not the request
CONNECT_S = 10.0
# Statuses of an app that is gone or cannot answer: from HAProxy, or from the app at the root, which has no such path.
AWAY = frozenset({404, 502, 503})
QUERY_CHARACTERS = "%&=+/?:@!$'()*,;~[]"
HUNG_UP = 499  # nginx's status for a client that did not wait for its answer
WARN_EVERY_S = 60.0

log = logging.getLogger("ray.serve")


class ModelRouter:
    """ASGI app in front of a model's own. It costs nothing while only one model is served.

    The middleware in front of it reads the body of a POST into `scope["state"]["body"]`.
    """

    def __init__(self, app: ASGIApp, model: str, root: str, routes: Callable[[], Routes]) -> None:
        """`model` is what `app` serves; `root` is the address behind which all apps are."""
        self.app = app
        self._model = model
        self._routes = routes
        timeout = httpx2.Timeout(None, connect=CONNECT_S)  # how long an answer may take is the door's business
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
        self._client = httpx2.AsyncClient(base_url=root, timeout=timeout, limits=limits)
        self._warned_at = -WARN_EVERY_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        routes = self._routes()
        asked: Body | None = scope.get("state", {}).get("body")
        if asked is None or not (routes.others or routes.canary):
            await self.app(scope, receive, send)
            return
        # while an app is being deleted, requests forwarded to its path end up here
        path = self._choose(asked.model, routes) if scope["path"].startswith("/v1/") else None
        if path is None:
            await self.app(scope, receive, send)
        elif path == routes.canary:
            if not await self._hand_on(path, scope, asked.raw, send, AWAY):
                self._warn(path)
                await self.app(scope, receive, send)
        elif not await self._hand_on(path, scope, asked.raw, send):
            message = f"the app that serves this model, at {path}, does not respond: try again"
            await JSONResponse({"error": message}, 503)(scope, _nothing, send)

    def _choose(self, model: str | None, routes: Routes) -> str | None:
        if model in routes.others:
            return routes.others[model]
        if model == self._model and random.uniform(0, 100) < routes.percent:
            return routes.canary
        return None

    def _warn(self, path: str) -> None:
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            log.warning(f"the canary at {path} does not respond: {self._model} answers its requests")

    async def _hand_on(
        self, path: str, scope: Scope, body: bytes, send: Send, away: frozenset[int] = frozenset()
    ) -> bool:
        """Forward the request to `path`, and return whether the client got an answer: not on a status in `away`."""
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_HANDED_ON]
        query = quote(scope["query_string"], safe=QUERY_CHARACTERS)
        url = f"{path}{quote(scope['path'])}{'?' if query else ''}{query}"
        try:
            asked = self._client.build_request("POST", url, content=body, headers=headers)
            answer = await self._client.send(asked, stream=True)
        except (httpx2.HTTPError, httpx2.InvalidURL):  # the latter: a query of more than 64 KiB
            return False
        async with contextlib.aclosing(answer):
            if answer.status_code in away:
                return False
            kept = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in NOT_HANDED_ON]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return True


class MetricsMiddleware:
    """ASGI app that notes what becomes of each request to the model of `app`."""

    def __init__(self, app: ASGIApp, note: Callable[[RequestOutcome], None]) -> None:
        self.app = app
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status, first_s = HUNG_UP, 0.0

        async def noted(message: Message) -> None:
            nonlocal status, first_s
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not first_s:  # a stream starts before there is anything to say
                first_s = time.perf_counter() - started

        try:
            await self.app(scope, receive, noted)
        except OSError:  # from `send`: the client has disconnected, which is no error of the app
            raise
        except Exception:
            status = 500
            raise
        finally:
            self._note(RequestOutcome(status, first_s, time.perf_counter() - started))


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
