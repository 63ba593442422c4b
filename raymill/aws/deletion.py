"""Delete one thing. What does not exist any more is done, and a failure does not keep the caller from the next one."""

import re
import time
from collections.abc import Callable, Iterable

from botocore.exceptions import BotoCoreError, ClientError

from raymill.aws import aws_errors
from raymill.errors import UserError

RELEASE_TIMEOUT_S = 60.0
"""How long EC2 may take to release what an ended instance used."""
RETRY_S = 2.0
IN_USE = re.compile(r"InUse|DependencyViolation|in use")


def attempt(what: str, delete: Callable[[], object]) -> list[str]:
    """Delete something. Return [], or a text that says what could not be deleted and why.

    While something still uses it, this waits.
    """
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while True:
        try:
            delete()
        except ClientError as error:
            if aws_errors.is_missing(error):
                return []
            if not IN_USE.search(str(error)) or time.monotonic() > deadline:
                return [f"{what}, because {aws_errors.explain(error)}"]
        except (UserError, BotoCoreError) as error:
            reason = aws_errors.explain(error) if isinstance(error, BotoCoreError) else str(error)
            return [f"{what}, because {reason}"]
        else:
            return []
        time.sleep(RETRY_S)


def attempt_each(kind: str, find: Callable[[], Iterable[str]], delete: Callable[[str], object]) -> list[str]:
    """Delete each thing of a kind that `find` returns the id of. Return what could not be deleted and why."""
    found: list[str] = []
    failures = attempt(f"each {kind}", lambda: found.extend(find()))
    return failures + [text for one in found for text in attempt(f"{kind} {one}", lambda one=one: delete(one))]
