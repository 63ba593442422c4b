"""Requests that AWS rejects: too many in a short time, with a wrong clock, or in a region that is not enabled.

EC2 has a token bucket for each kind of call, per account and region.
https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-troubleshooting.html
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

import datetime
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from raymill.emulator.iam import QUERY_SERVICES, AwsError, unknown_key


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


TOLERANCE = datetime.timedelta(minutes=5)
FORMAT = "%Y%m%dT%H%M%SZ"


def check_clock(environ: Mapping[str, Any], service: str, ahead_s: float) -> None:
    """Raise `AwsError` if the request's date differs from that of AWS, whose clock is `ahead_s` seconds ahead."""
    if "HTTP_X_AMZ_DATE" not in environ:
        return
    date = environ["HTTP_X_AMZ_DATE"]
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead_s)
    late = now - datetime.datetime.strptime(date, FORMAT).replace(tzinfo=datetime.UTC)
    if abs(late) <= TOLERANCE:
        return
    if service == "ec2":
        raise unknown_key(service)  # it does not tell what is wrong
    if service == "s3":
        message = "The difference between the request time and the current time is too large."
        raise AwsError("RequestTimeTooSkewed", message)
    if late > TOLERANCE:
        message = f"Signature expired: {date} is now earlier than {now - TOLERANCE:{FORMAT}} ({now:{FORMAT}} - 5 min.)"
    else:
        limit = f"{now + TOLERANCE:{FORMAT}}"
        message = f"Signature not yet current: {date} is still later than {limit} ({now:{FORMAT}} + 5 min.)"
    raise AwsError("SignatureDoesNotMatch" if service in QUERY_SERVICES else "InvalidSignature", message)


def check_region(service: str, region: str, disabled: Collection[str]) -> None:
    """Raise `AwsError` if the region is not enabled in the account, and therefore knows none of its credentials."""
    if region in disabled:
        raise unknown_key(service)
