"""EC2's limits on request rates: a token bucket for each kind of call, per account and region.

https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from raymill.emulator.iam import AwsError


@dataclass
class Bucket:
    """A bucket of tokens. Each call takes one; without a token, EC2 rejects the call."""

    size: float
    refill: float
    """Tokens per second."""
    tokens: float = field(init=False)
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.at = self.size, 0.0

    def take(self, now: float) -> bool:
        """Return whether there is a token, and take it. `now` is in seconds."""
        self.tokens = min(self.size, self.tokens + (now - self.at) * self.refill)
        self.at = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class Throttle:
    """The buckets of one account."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets = {
            "RunInstances": Bucket(5, 2),
            "TerminateInstances": Bucket(100, 5),
            "CreateTags": Bucket(100, 10),
            "reading": Bucket(100, 20),
            "changing": Bucket(50, 5),
        }
        self._lock = threading.Lock()

    def check(self, service: str, action: str) -> None:
        """Raise `AwsError` if there are too many calls of this kind."""
        if service != "ec2":
            return
        kind = action if action in self._buckets else "reading" if action.startswith("Describe") else "changing"
        with self._lock:
            if not self._buckets[kind].take(self._clock()):
                raise AwsError("RequestLimitExceeded", "Request limit exceeded.")
