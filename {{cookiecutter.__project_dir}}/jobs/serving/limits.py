"""How much each key may ask of one replica: requests a minute, and requests at once."""

import math
import time
from collections import Counter

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter


class Limits:
    """Counts the requests of each key. Each replica counts its own: two replicas admit twice as many in all."""

    def __init__(self, per_minute: int, at_once: int) -> None:
        self._per_minute = RateLimitItemPerMinute(per_minute)
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._at_once = at_once
        self._running: Counter[str] = Counter()

    def begin(self, name: str) -> int:
        """Count a request, to be ended by `end`; or refuse it: seconds after which to try again, else 0."""
        if self._running[name] >= self._at_once:
            return 1
        if not self._limiter.hit(self._per_minute, name):
            reset = self._limiter.get_window_stats(self._per_minute, name).reset_time
            return max(1, math.ceil(reset - time.time()))
        self._running[name] += 1
        return 0

    def end(self, name: str) -> None:
        """A request that `begin` counted is over, however it went."""
        self._running[name] -= 1
