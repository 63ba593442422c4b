"""The eventual consistency of AWS: what one call has done, others see only later.

- ListSecrets lags behind by up to five minutes.
  https://docs.aws.amazon.com/secretsmanager/latest/apireference/API_ListSecrets.html
- A secret's name is free again only some time after the secret was deleted without recovery.
  https://docs.aws.amazon.com/secretsmanager/latest/apireference/API_DeleteSecret.html
- For some seconds, EventBridge Scheduler does not know a role that a stack has just made.
  https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot.html#troubleshoot_general_eventual-consistency
- For some seconds after a launch, calls that describe or terminate the instance by its id fail. Calls that tag it could
  fail too, but then `ray up` would wait forever.
  https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html
- S3 rejects a conditional write if it is working on another write to the same object. Here, it rejects every third one.
  https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
- Large instances stay in the state "shutting-down" for minutes before they are terminated.
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html
"""

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moto.ec2.models.instances import Instance, InstanceState

from raymill.emulator.iam import AwsError

LIST_LAG_S = 300
NAME_LAG_S = 10
INSTANCE_LAG_S = 2
ROLE_LAG_S = 5
CONFLICT = "ConditionalRequestConflict"
UNKNOWN_ROLE = "The execution role you provide must allow AWS EventBridge Scheduler to assume the role."


class Consistency:
    """What callers cannot see yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lists: dict[str, tuple[float, bytes]] = {}
        """Maps the account, region and request of a ListSecrets call to the time of the answer and the answer."""
        self._deleted: dict[str, float] = {}
        """Maps the account, region and name of a deleted secret to the time of its deletion."""
        self._roles_made = -float("inf")
        """Time at which a stack and its roles were last made."""
        self._launched: dict[str, float] = {}
        """Maps the id of an instance to the time of its launch."""
        self._conditional_writes = itertools.count()

    def check_write(self, headers: Mapping[str, Any]) -> None:
        """Raise `AwsError` if S3 rejects a write with these WSGI headers because of another write."""
        is_conditional = "HTTP_IF_MATCH" in headers or "HTTP_IF_NONE_MATCH" in headers
        if is_conditional and next(self._conditional_writes) % 3 == 0:
            raise AwsError(CONFLICT, "A conflicting operation occurred during processing of the request.")

    def check(self, action: str, parameters: Mapping[str, Any], place: str = "") -> None:
        """Raise `AwsError` if a call names something that does not exist yet, or that is not quite gone.

        `place` is the account and the region of the call, as in the other methods.
        """
        now = self._clock()
        for name, value in parameters.items():
            is_id = re.fullmatch(r"InstanceId\.\d+", name)
            if is_id and now - self._launched.get(value, -INSTANCE_LAG_S) < INSTANCE_LAG_S:
                raise AwsError("InvalidInstanceID.NotFound", f"The instance ID '{value}' does not exist")
        deleted = self._deleted.get(f"{place} {parameters.get('Name')}", -NAME_LAG_S)
        if action == "CreateSecret" and now - deleted < NAME_LAG_S:
            raise AwsError(
                "InvalidRequest",
                "You can't create this secret because a secret with this name is already scheduled for deletion.",
            )
        if action == "CreateStack":
            self._roles_made = now
        if re.match("(POST|PUT) /schedules/", action) and now - self._roles_made < ROLE_LAG_S:
            raise AwsError("Validation", UNKNOWN_ROLE)
        if action == "DeleteSecret":
            self._deleted[f"{place} {parameters['SecretId']}"] = now

    def note_launch(self, instance_ids: Iterable[str]) -> None:
        self._launched |= dict.fromkeys(instance_ids, self._clock())

    def stale_list(self, action: str, parameters: Mapping[str, Any], place: str = "") -> bytes | None:
        """Return the answer to an earlier call if this call gets the same one, or None."""
        kept = self._lists.get(f"{place} {json.dumps(parameters)}") if action == "ListSecrets" else None
        return kept[1] if kept and self._clock() - kept[0] < LIST_LAG_S else None

    def keep_list(self, parameters: Mapping[str, Any], answer: bytes, place: str = "") -> None:
        """Keep the answer to a ListSecrets call for later calls."""
        self._lists[f"{place} {json.dumps(parameters)}"] = self._clock(), answer


class SlowEnds:
    """How long instances take to terminate."""

    def __init__(self) -> None:
        self.seconds = 0.0


def install_slow_ends(slow_ends: SlowEnds) -> None:
    """Change how moto terminates instances in this process."""
    terminate = Instance.terminate

    def begin(self: Any) -> InstanceState:
        if self.state == "shutting-down":
            return InstanceState(self._state.name, self._state.code)
        previous = terminate(self)
        if slow_ends.seconds and previous.name != "terminated":
            _set_state(self, "shutting-down", 32)
            threading.Timer(slow_ends.seconds, _set_state, (self, "terminated", 48)).start()
        return previous

    Instance.terminate = begin


def _set_state(instance: Any, name: str, code: int) -> None:
    instance._state.name, instance._state.code = name, code
