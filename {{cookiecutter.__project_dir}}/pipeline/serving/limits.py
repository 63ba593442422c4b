"""Limits what each key may ask of a replica, and what the replica works on at once.

Both count sequences, because a request with several prompts or answers is as much work as several requests.
"""

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from typing import NamedTuple

WINDOW_S = 60.0


class RequestLimits(NamedTuple):
    """The limits that a replica enforces."""

    per_minute: int
    """Maximum sequences per minute and key."""
    at_once: int
    """Maximum sequences in progress per key."""
    max_body: int
    """Maximum bytes of a request's body."""
    timeout_s: float
    """Seconds in which a request must be fully answered, including its time in the queue."""
    body_timeout_s: float = 30.0
    """Seconds in which a request's body must arrive."""
    max_sequences: int = 64
    """Maximum sequences of one request."""
    slots: int = 128
    """Maximum sequences that the replica works on at once."""
    max_waiting: int = 128
    """Maximum requests that wait for a slot."""


class Limits:
    """Counts the sequences of each key. Each replica counts separately, so two replicas admit twice as many."""

    def __init__(self, per_minute: int, at_once: int) -> None:
        self._per_minute = per_minute
        self._at_once = at_once
        self._begun: defaultdict[str, deque[float]] = defaultdict(deque)  # start times of the last minute's sequences
        self._running: Counter[str] = Counter()

    def begin(self, name: str, count: int = 1) -> int:
        """Count the sequences and return 0, or return the seconds after which to retry. `end` releases them."""
        if self._running[name] + count > self._at_once:
            return 1
        begun, now = self._begun[name], time.monotonic()
        while begun and now - begun[0] >= WINDOW_S:
            begun.popleft()
        if begun and (over := len(begun) + count - self._per_minute) > 0:
            return math.ceil(begun[min(over, len(begun)) - 1] + WINDOW_S - now)
        begun.extend([now] * count)
        self._running[name] += count
        return 0

    def end(self, name: str, count: int = 1) -> None:
        """Release sequences that `begin` counted."""
        self._running[name] -= count


class QueueFull(Exception):
    """The queue is full."""


class Slots:
    """Slots for the sequences that a replica works on at once. Further requests queue, first come, first served."""

    def __init__(self, slots: int, max_waiting: int) -> None:
        self._free = slots
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        """Wait for `count` slots. `give` returns them.

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
            if not granted.cancelled():  # it was granted and cancelled at the same moment
                self.give(count)
            elif (count, granted) in self._waiting:
                self._waiting.remove((count, granted))
                self.give(0)  # the next one may need fewer
            raise

    def give(self, count: int) -> None:
        """Return slots, and grant them to waiting requests."""
        self._free += count
        while self._waiting:
            wanted, granted = self._waiting[0]
            if granted.done():  # cancelled: its task has not run since
                self._waiting.popleft()
                continue
            if wanted > self._free:
                return
            self._waiting.popleft()
            self._free -= wanted
            granted.set_result(None)
