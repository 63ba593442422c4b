"""The guard outside the cluster, which ends all instances after the limit in hours, even if all machines are broken.

A schedule of EventBridge Scheduler calls the function `Guard` in stack.yaml. The schedule is not part of the stack,
because it moves with the limit.
https://docs.aws.amazon.com/scheduler/latest/UserGuide/schedule-types.html#rate-based
"""

import datetime
import time
from collections.abc import Callable

import botocore.exceptions

from raymill.aws import stack
from raymill.common import instances, limits
from raymill.common.cluster_file import ClusterFile, target
from raymill.common.instances import Instance
from raymill.errors import UserError

RATE = "rate(10 minutes)"
"""The guard runs repeatedly, in case a call fails or another instance starts."""
GRACE = datetime.timedelta(minutes=15)
"""The watchdog ends the cluster at the limit. The guard first runs this much later."""
ROLE_TIMEOUT_S = 60
"""How long EventBridge Scheduler may not know a new role."""


def prepare(file: ClusterFile, head: Instance | None) -> None:
    """Create the guard of a new cluster. That of a running cluster stays: its limit may differ."""
    if head is None or not exists(file):
        move(file, head.launched if head else datetime.datetime.now(datetime.UTC), limits.load().hours)


def follow_head(file: ClusterFile) -> None:
    """Let the guard run after the limit in settings.toml, which is also that of the running head."""
    if head := instances.head(file):
        move(file, head.launched, limits.load().hours)


def move(file: ClusterFile, launched: datetime.datetime, hours: float) -> None:
    """Let the guard run when a head launched at that time is `hours` and GRACE old. Create the guard if there is none.

    Raises:
        UserError: the stack is older than the guard.
    """
    found = (stack.find(file) or {}).get("Outputs", [])
    outputs = {one["OutputKey"]: one["OutputValue"] for one in found}
    if "Guard" not in outputs:
        raise UserError(f"the stack {file.slug} has no guard yet. Run: inv prepare --target {target()}")
    end = launched + datetime.timedelta(hours=hours) + GRACE
    schedule = {
        "Name": _name(file),
        "ScheduleExpression": RATE,
        "StartDate": max(end, datetime.datetime.now(datetime.UTC)),  # AWS refuses times in the past
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "Target": {"Arn": outputs["Guard"], "RoleArn": outputs["GuardCaller"]},
    }
    client = file.client("scheduler")

    def put() -> None:
        try:
            (client.update_schedule if exists(file) else client.create_schedule)(**schedule)
        except client.exceptions.ConflictException:  # somebody else has just created it
            client.update_schedule(**schedule)

    _when_the_role_is_known(put)


def exists(file: ClusterFile) -> bool:
    """Return whether there is a schedule."""
    client = file.client("scheduler")
    try:
        client.get_schedule(Name=_name(file))
    except client.exceptions.ResourceNotFoundException:
        return False
    return True


def delete(file: ClusterFile) -> None:
    """Delete the schedule, if there is one."""
    client = file.client("scheduler")
    try:
        client.delete_schedule(Name=_name(file))
    except client.exceptions.ResourceNotFoundException:
        return


def _name(file: ClusterFile) -> str:
    return f"{file.slug}-guard"


def _when_the_role_is_known(put: Callable[[], object]) -> None:
    """Call `put` until EventBridge Scheduler can assume the role, which CloudFormation may have just made."""
    deadline = time.monotonic() + ROLE_TIMEOUT_S
    while True:
        try:
            put()
        except botocore.exceptions.ClientError as error:
            if "to assume the role" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1)
        else:
            return
