"""Request limits. Most count sequences, because a request with n prompts or answers is as much work as n requests.

Tokens are counted when a request ends, so the requests in progress can take a key beyond its limit.
"""

import math
import time
from collections import Counter, defaultdict, deque
from typing import NamedTuple

WINDOW_S = 60.0
SHUTDOWN_MARGIN_S = 15.0
"""A stopping replica still gets requests for 3 s, and a request that times out is stopped within 10 s."""


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
    tokens_per_minute: int = 0
    """Maximum tokens of prompts and answers per minute per key. 0: no maximum."""

    @property
    def shutdown_s(self) -> float:
        """Seconds that a replica may take to stop during an update: its requests end first."""
        return self.timeout_s + SHUTDOWN_MARGIN_S


class RateLimiter:
    """Limits the sequences and tokens of each key. Each replica counts separately, so two admit twice as many."""

    def __init__(self, per_minute: int, at_once: int, tokens_per_minute: int = 0) -> None:
        self._at_once = at_once
        self._sequences: defaultdict[str, Window] = defaultdict(lambda: Window(per_minute))
        self._tokens: defaultdict[str, Window] = defaultdict(lambda: Window(tokens_per_minute))
        self._has_token_limit = tokens_per_minute > 0
        self._running: Counter[str] = Counter()

    def acquire(self, key: str, count: int = 1) -> int:
        """Count sequences as started and, until `release`, as in progress. Return 0.

        If they exceed a limit, or the key has used up its tokens, count none of them and return the seconds to wait
        before the next attempt.
        """
        if self._running[key] + count > self._at_once:
            return 1
        now, sequences = time.monotonic(), self._sequences[key]
        wait_s = sequences.wait_s(count, now)
        if self._has_token_limit:
            wait_s = max(wait_s, self._tokens[key].wait_s(1, now))
        if wait_s:
            return wait_s
        sequences.add(count, now)
        self._running[key] += count
        return 0

    def release(self, key: str, count: int = 1) -> None:
        """Stop counting sequences as in progress."""
        self._running[key] -= count

    def add_tokens(self, key: str, count: int) -> None:
        """Count the tokens of a request that has ended."""
        if self._has_token_limit:
            self._tokens[key].add(count, time.monotonic())

    def headers(self, key: str) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers about the limits: https://platform.openai.com/docs/guides/rate-limits"""
        now = time.monotonic()
        windows = {"requests": self._sequences[key]} | ({"tokens": self._tokens[key]} if self._has_token_limit else {})
        return [
            (f"x-ratelimit-{what}-{name}".encode(), value.encode())
            for name, window in windows.items()
            for what, value in window.describe(now).items()
        ]


class Window:
    """What one key has used in the last WINDOW_S seconds."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used: deque[tuple[float, int]] = deque()
        """The time and the amount of each use."""
        self._total = 0

    def add(self, count: int, now: float) -> None:
        """Count a use."""
        if count:
            self._used.append((now, count))
            self._total += count

    def wait_s(self, count: int, now: float) -> int:
        """Return the seconds until another `count` are within the limit. An empty window admits any number."""
        self._forget(now)
        left, free_at = self._total, now
        for at, used in self._used:
            if left + count <= self._limit:
                break
            left -= used
            free_at = at + WINDOW_S
        return math.ceil(free_at - now)

    def describe(self, now: float) -> dict[str, str]:
        """Return the limit, what remains of it, and the time until all of it remains."""
        self._forget(now)
        reset_s = math.ceil(self._used[-1][0] + WINDOW_S - now) if self._used else 0
        return {
            "limit": f"{self._limit}",
            "remaining": f"{max(0, self._limit - self._total)}",
            "reset": f"{reset_s}s",
        }

    def _forget(self, now: float) -> None:
        while self._used and now - self._used[0][0] >= WINDOW_S:
            self._total -= self._used.popleft()[1]
