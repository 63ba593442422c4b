"""A bounded queue in front of a replica's engine."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from raymill.serving.accounting import current
from raymill.serving.errors import ApiError, always_alive, engine_dead
from raymill.serving.rate_limits import RequestLimits

QUEUE_RETRY_S = 1
# Turns off Ray's own limit of requests per replica, which also counts health checks and uploads in progress.
NO_RAY_LIMIT = 100_000


class QueueFull(Exception):
    """The queue is full."""


class _Waiting(NamedTuple):
    """A request that waits for slots."""

    key: str
    count: int
    granted: asyncio.Future[None]


class Slots:
    """Slots for the sequences that a replica processes at once.

    Further requests queue. The next slots go to the key that has the fewest, and among its requests to the first.
    """

    def __init__(self, slots: int, max_waiting: int) -> None:
        self._free = slots
        self._max_waiting = max_waiting
        self._waiting: list[_Waiting] = []
        self._taken: Counter[str] = Counter()
        """Slots of each key."""

    async def acquire(self, count: int, key: str = "") -> None:
        """Wait for `count` slots. `release` returns them.

        Raises:
            QueueFull: too many requests are waiting.
        """
        if not self._waiting and count <= self._free:
            self._take(count, key)
            return
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull
        waiting = _Waiting(key, count, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._grant()  # it may come before those that wait already
        try:
            await waiting.granted
        except asyncio.CancelledError:
            if not waiting.granted.cancelled():  # the slots were granted at the moment of the cancellation
                self.release(count, key)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                self._grant()  # the next request may need fewer slots
            raise

    def release(self, count: int, key: str = "") -> None:
        """Return slots, and grant them to waiting requests."""
        self._free += count
        self._taken[key] -= count
        self._grant()

    def _grant(self) -> None:
        # a cancelled request's task may not have run since
        self._waiting = [waiting for waiting in self._waiting if not waiting.granted.done()]
        while self._waiting:
            first = min(self._waiting, key=lambda waiting: self._taken[waiting.key])
            if first.count > self._free:
                return
            self._waiting.remove(first)
            self._take(first.count, first.key)
            first.granted.set_result(None)

    def _take(self, count: int, key: str) -> None:
        self._free -= count
        self._taken[key] += count


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
        record = current.get()
        key = record.key if record else ""
        try:
            await self._slots.acquire(body.sequences, key)
        except QueueFull:
            message = "the server's queue is full; try again in a moment"
            raise ApiError(503, message, code="overloaded", headers={"Retry-After": str(QUEUE_RETRY_S)}) from None
        try:
            await self.app(scope, receive, send)
        finally:
            self._slots.release(body.sequences, key)
