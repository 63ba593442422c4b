"""How much each key may ask of one replica: requests a minute, and requests at once."""

import math
import time
from collections import Counter, defaultdict, deque
from typing import NamedTuple

WINDOW_S = 60.0


class Rules(NamedTuple):
    """What a replica holds requests to."""

    per_minute: int
    """Requests in a minute of each key."""
    at_once: int
    """Requests in progress of each key."""
    max_body: int
    """Bytes of a request's body."""
    timeout_s: float
    """Seconds in which a request must be answered whole."""


class Limits:
    """Counts the requests of each key. Each replica counts its own: two replicas admit twice as many in all."""

    def __init__(self, per_minute: int, at_once: int) -> None:
        # when each of the latest requests began: the limit is reached when the oldest of so many is not a minute old
        self._begun: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=per_minute))
        self._at_once = at_once
        self._running: Counter[str] = Counter()

    def begin(self, name: str) -> int:
        """Count a request, to be ended by `end`; or refuse it: seconds after which to try again, else 0."""
        if self._running[name] >= self._at_once:
            return 1
        begun, now = self._begun[name], time.monotonic()
        if len(begun) == begun.maxlen and now - begun[0] < WINDOW_S:
            return math.ceil(begun[0] + WINDOW_S - now)
        begun.append(now)  # the oldest falls out
        self._running[name] += 1
        return 0

    def end(self, name: str) -> None:
        """A request that `begin` counted is over, however it went."""
        self._running[name] -= 1
