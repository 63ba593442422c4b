"""Request limits. Most count sequences, because a request with n prompts or answers is as much work as n requests."""

import math
import time
from collections import Counter, defaultdict, deque
from typing import NamedTuple

WINDOW_S = 60.0


class RequestLimits(NamedTuple):
    """The limits that a replica enforces."""

    per_minute: int
    """Maximum sequences per minute per key."""
    at_once: int
    """Maximum sequences in progress per key."""
    max_body: int
    """Maximum bytes of a request's body."""
    timeout_s: float
    """Seconds within which a request must be fully answered, including its time in the queue."""
    body_timeout_s: float = 30.0
    """Seconds within which a request's body must arrive."""
    max_sequences: int = 64
    """Maximum sequences of one request."""
    slots: int = 128
    """Maximum sequences that the replica processes at once."""
    max_waiting: int = 128
    """Maximum requests that wait for a slot."""


class RateLimiter:
    """Limits the sequences of each key. Each replica counts separately, so two replicas admit twice as many."""

    def __init__(self, per_minute: int, at_once: int) -> None:
        self._per_minute = per_minute
        self._at_once = at_once
        self._started: defaultdict[str, deque[float]] = defaultdict(deque)  # start times of the last minute's sequences
        self._running: Counter[str] = Counter()

    def acquire(self, key: str, count: int = 1) -> int:
        """Count sequences as started and, until `release`, as in progress. Return 0.

        If they exceed a limit, count none of them and return the seconds to wait before the next attempt.
        """
        if self._running[key] + count > self._at_once:
            return 1
        started, now = self._started[key], time.monotonic()
        while started and now - started[0] >= WINDOW_S:
            started.popleft()
        if started and (excess := len(started) + count - self._per_minute) > 0:
            return math.ceil(started[min(excess, len(started)) - 1] + WINDOW_S - now)
        started.extend([now] * count)
        self._running[key] += count
        return 0

    def release(self, key: str, count: int = 1) -> None:
        """Stop counting sequences as in progress."""
        self._running[key] -= count
