"""Finds the app that serves a request's model: rejects unknown names, and forwards requests for other models.

A canary's share of requests is forwarded, too.
"""

import contextlib
import logging
import random
import time
from collections.abc import Callable, Container, Mapping
from urllib.parse import quote

import httpx2
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from raymill.serving.accounting import RequestRecord, current
from raymill.serving.body_checks import Body
from raymill.serving.errors import FALLBACK_HEADER, UNAVAILABLE, ApiError, no_request
from raymill.serving.routing_state import Routes

# Headers that belong to this connection, not to the request.
NOT_FORWARDED = {b"host", b"content-length", b"connection", b"transfer-encoding", FALLBACK_HEADER}
CONNECT_TIMEOUT_S = 10.0
QUERY_CHARACTERS = "%&=+/?:@!$'()*,;~[]"
WARNING_INTERVAL_S = 60.0

log = logging.getLogger("ray.serve")


class ModelRouter:
    """ASGI middleware in front of the app at the root path. Forwards nothing while only one model is served.

    Requires `ApiMiddleware` in front, which puts the body of a POST and a token into `scope["state"]`.
    """

    def __init__(self, app: ASGIApp, model: str, root: str, routes: Callable[[], Routes]) -> None:
        """`model` is the name of `app`'s model; `root` is the URL of Serve's HTTP server."""
        self.app = app
        self._model = model
        self._routes = routes
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)  # `ApiMiddleware` limits the time for an answer
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
        self._client = httpx2.AsyncClient(base_url=root, timeout=timeout, limits=limits)
        self._warned_at = -WARNING_INTERVAL_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        routes = self._routes()
        body: Body | None = scope.get("state", {}).get("body")
        if body is None or not (routes.others or routes.canary):
            await self.app(scope, receive, send)
            return
        # requests that were forwarded to an app that is being deleted arrive here, and must not be forwarded again
        path = self._choose(body.model, routes) if scope["path"].startswith("/v1/") else None
        if path is None:
            await self.app(scope, receive, send)
            return
        record = current.get() or RequestRecord("")
        record.is_forwarded = True  # the other app records it, even if the client disconnects now
        if await self._forward(path, scope, body.raw, send, has_fallback=path == routes.canary):
            return
        record.is_forwarded = False
        if path == routes.canary:
            self._warn(path)
            await self.app(scope, receive, send)
        else:
            message = f"the app that serves this model, at {path}, does not respond; try again"
            await JSONResponse({"error": message}, 503)(scope, no_request, send)

    def _choose(self, model: str | None, routes: Routes) -> str | None:
        """Return the path of the app for a request, or None for this app."""
        if model in routes.others:
            return routes.others[model]
        if model == self._model and random.uniform(0, 100) < routes.percent:
            return routes.canary
        return None

    def _warn(self, path: str) -> None:
        if time.monotonic() - self._warned_at >= WARNING_INTERVAL_S:
            self._warned_at = time.monotonic()
            log.warning(f"the canary at {path} does not respond; the main model answers the requests for {self._model}")

    async def _forward(self, path: str, scope: Scope, body: bytes, send: Send, *, has_fallback: bool) -> bool:
        """Forward the request and its response, and return True.

        If the app does not respond, or with `has_fallback`, if its status is in UNAVAILABLE, send no response and
        return False.
        """
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_FORWARDED]
        if has_fallback:
            headers.append((FALLBACK_HEADER, scope["state"]["token"]))
        query = quote(scope["query_string"], safe=QUERY_CHARACTERS)
        url = f"{path}{quote(scope['path'])}{'?' if query else ''}{query}"
        try:
            request = self._client.build_request("POST", url, content=body, headers=headers)
            response = await self._client.send(request, stream=True)
        except (httpx2.HTTPError, httpx2.InvalidURL):  # InvalidURL: the query is longer than 64 KiB
            return False
        async with contextlib.aclosing(response):
            if has_fallback and response.status_code in UNAVAILABLE:
                return False
            kept = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in NOT_FORWARDED]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return True


MAX_NAME_SHOWN = 200  # maximum characters of a model's name in an error message


class KnownModels:
    """ASGI middleware that looks the requested model up among the names that the app serves.

    vLLM's resolvers take any name for that of an adapter, and vLLM keeps a lock for each, however long it is. Requires
    `ApiMiddleware` in front, which inspects the body. A body without a name passes, because vLLM then uses the model.
    """

    def __init__(self, app: ASGIApp, names: Callable[[], Container[str]], problems: Mapping[str, str]) -> None:
        """`names` returns the names of the app's model and its adapters; `problems` says what is wrong with others."""
        self.app = app
        self._names = names
        self._problems = problems

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: Body | None = scope.get("state", {}).get("body")
        if body and body.model and body.model not in self._names():
            if problem := self._problems.get(body.model):
                raise ApiError(400, f"the adapter of {body.model} cannot be used: {problem}", param="model")
            raise unknown_model(body.model)
        await self.app(scope, receive, send)


def unknown_model(name: str) -> ApiError:
    """Return the error for a request for a model that nobody serves."""
    message = f"model `{name[:MAX_NAME_SHOWN]}` does not exist; list the models with GET /v1/models"
    return ApiError(404, message, param="model")
