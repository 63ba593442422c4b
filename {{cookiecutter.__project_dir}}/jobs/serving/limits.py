"""How much each key may ask of one replica, and how much the replica works on at once.

Both count sequences: a request for several prompts, or several answers to one, is as much work as so many requests.
"""

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from typing import NamedTuple

WINDOW_S = 60.0


class Rules(NamedTuple):
    """What a replica holds requests to."""

    per_minute: int
    """Sequences in a minute of each key."""
    at_once: int
    """Sequences in progress of each key."""
    max_body: int
    """Bytes of a request's body."""
    timeout_s: float
    """Seconds in which a request must be answered whole, those in the queue among them."""
    body_timeout_s: float = 30.0
    """Seconds in which its body must have arrived."""
    max_sequences: int = 64
    """Sequences of one request."""
    slots: int = 128
    """Sequences that the replica works on at once."""
    max_waiting: int = 128
    """Requests that wait for them."""


class Limits:
    """Counts what each key asks. Each replica counts its own: two replicas admit twice as many in all."""

    def __init__(self, per_minute: int, at_once: int) -> None:
        self._per_minute = per_minute
        self._at_once = at_once
        self._begun: defaultdict[str, deque[float]] = defaultdict(deque)  # when each of the last minute began
        self._running: Counter[str] = Counter()

    def begin(self, name: str, count: int = 1) -> int:
        """Count so many, to be ended by `end`; or refuse them: seconds after which to try again, else 0."""
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
        """What `begin` counted is over, however it went."""
        self._running[name] -= count


class QueueFull(Exception):
    """As many requests wait as may."""


class Slots:
    """Sequences that a replica works on at once. Requests for more wait in a queue, first come, first served."""

    def __init__(self, slots: int, max_waiting: int) -> None:
        self._free = slots
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        """Wait for so many slots, to be given back by `give`.

        Raises:
            QueueFull: too many requests wait already.
        """
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove((count, turn))
                self.give(0)  # the next one may need fewer
            else:  # its turn came at the same moment
                self.give(count)
            raise

    def give(self, count: int) -> None:
        """Give slots back, to those who wait."""
        self._free += count
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, turn = self._waiting.popleft()
            self._free -= wanted
            turn.set_result(None)
