"""Middleware that records the outcome of each POST request: status and latency."""

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raymill.serving.canary import RequestOutcome
from raymill.serving.errors import CLIENT_CLOSED_REQUEST


class MetricsMiddleware:
    """ASGI middleware that passes the outcome of each POST request to `record`."""

    def __init__(self, app: ASGIApp, record: Callable[[RequestOutcome], None]) -> None:
        self.app = app
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status, first_s = CLIENT_CLOSED_REQUEST, 0.0

        async def timed_send(message: Message) -> None:
            nonlocal status, first_s
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not first_s:  # a stream's response starts before its first token
                first_s = time.perf_counter() - started

        try:
            await self.app(scope, receive, timed_send)
        except OSError:  # from `send`: the client disconnected, which is not the app's error
            raise
        except Exception:
            status = 500
            raise
        finally:
            self._record(RequestOutcome(status, first_s, time.perf_counter() - started))
