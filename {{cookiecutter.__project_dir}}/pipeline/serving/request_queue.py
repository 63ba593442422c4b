"""A bounded queue in front of a replica's engine."""

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.serving.errors import ApiError, always_alive, engine_dead
from pipeline.serving.rate_limits import RequestLimits

QUEUE_RETRY_S = 1
# Turns off Ray's own limit of requests per replica, which also counts health checks and uploads in progress.
NO_RAY_LIMIT = 100_000


class QueueFull(Exception):
    """The queue is full."""


class Slots:
    """Slots for the sequences that a replica processes at once. Further requests queue, first come, first served."""

    def __init__(self, slots: int, max_waiting: int) -> None:
        self._free = slots
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, count: int) -> None:
        """Wait for `count` slots. `release` returns them.

        Raises:
            QueueFull: too many requests are waiting.
        """
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((count, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # the slots were granted at the moment of the cancellation
                self.release(count)
            elif (count, granted) in self._waiting:
                self._waiting.remove((count, granted))
                self.release(0)  # the next request may need fewer slots
            raise

    def release(self, count: int) -> None:
        """Return slots, and grant them to waiting requests."""
        self._free += count
        while self._waiting:
            wanted, granted = self._waiting[0]
            if granted.done():  # this request was cancelled, and its task has not run since
                self._waiting.popleft()
                continue
            if wanted > self._free:
                return
            self._waiting.popleft()
            self._free -= wanted
            granted.set_result(None)


class QueueMiddleware:
    """ASGI middleware that limits the sequences an engine processes at once. Further requests wait in a queue.

    It runs behind `ApiMiddleware` and `ModelRouter`, so a request for another app takes no slot here.
    """

    def __init__(self, app: ASGIApp, limits: RequestLimits, alive: Callable[[], bool] = always_alive) -> None:
        """`alive` returns whether the app's engine is alive."""
        self.app = app
        self._slots = Slots(limits.slots, limits.max_waiting)
        self._alive = alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = scope.get("state", {}).get("body")
        if body is None:  # not a POST, so there is no work for the engine
            await self.app(scope, receive, send)
            return
        if not self._alive():
            raise engine_dead()
        try:
            await self._slots.acquire(body.sequences)
        except QueueFull:
            message = "the server's queue is full; try again in a moment"
            raise ApiError(503, message, code="overloaded", headers={"Retry-After": str(QUEUE_RETRY_S)}) from None
        try:
            await self.app(scope, receive, send)
        finally:
            self._slots.release(body.sequences)
