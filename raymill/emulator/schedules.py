"""EventBridge Scheduler and Lambda in the emulated cloud: calls the functions of schedules that are due.

moto stores both, and calls nothing. A function runs as a process on this machine, with the credentials of its role, so
that the emulated IAM checks its calls. Whatever is not modeled here fails.
"""

import datetime
import io
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from moto.awslambda.models import lambda_backends
from moto.iam.models import iam_backends
from moto.scheduler.models import scheduler_backends
from moto.sts.models import sts_backends

from raymill.emulator.consistency import UNKNOWN_ROLE
from raymill.emulator.iam import AwsError, Permission, account_of, is_allowed, statements_of

START_LAG_S = 300
"""How far in the past a schedule may start."""


class Schedules:
    """Calls the functions of schedules at their times."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the URL of the emulated AWS, which the functions call."""
        self._endpoint = endpoint
        self._called: dict[str, float] = {}
        """Maps the ARN of a schedule to the time of its last call."""

    def run_forever(self) -> None:
        while True:
            try:
                self.call_due()
            except Exception as error:  # nothing else reports the errors of a thread
                print(f"a schedule failed: {error!r}", file=sys.stderr, flush=True)
            time.sleep(1)

    def call_due(self) -> list[str]:
        """Call the function of each schedule that is due, and return the functions' names."""
        called = []
        for region, schedule in _schedules():
            period_s, start = _period_s(schedule.schedule_expression), _seconds(schedule.start_date)
            due = max(start, self._called.get(schedule.arn, 0.0) + period_s)
            if schedule.state != "DISABLED" and time.time() >= due:  # after an update, moto has None for ENABLED
                self._called[schedule.arn] = time.time()
                called.append(self._call(region, schedule.target))
        return called

    def _call(self, region: str, target: Mapping[str, Any]) -> str:
        function = lambda_backends[account_of(target["Arn"])][region].get_function(target["Arn"])
        _check_caller(target["RoleArn"], function.function_arn)
        session = sts_backends[account_of(function.role)]["global"].assume_role(
            region_name=region,
            role_session_name=function.function_name,
            role_arn=_trusting(function.role, "lambda.amazonaws.com").arn,
            policy="",
            duration=900,
            external_id="",
        )
        variables = {
            "PATH": os.environ["PATH"],
            "AWS_ENDPOINT_URL": self._endpoint,
            "AWS_DEFAULT_REGION": region,
            "AWS_ACCESS_KEY_ID": session.access_key_id,
            "AWS_SECRET_ACCESS_KEY": session.secret_access_key,
            "AWS_SESSION_TOKEN": session.session_token,
        }
        if function.handler != "index.handler":
            raise NotImplementedError(f"the emulator calls only index.handler, and a function has {function.handler}")
        code = zipfile.ZipFile(io.BytesIO(function.code_bytes)).read("index.py").decode()
        command = [sys.executable, "-c", f"{code}\nhandler({{}}, None)"]
        subprocess.run(command, env=variables, timeout=function.timeout, check=True)
        return function.function_name


def check(schedule: Mapping[str, Any]) -> None:
    """Raise `AwsError` if AWS refuses the schedule: its start is long past, or its role does not exist."""
    if schedule["StartDate"] < time.time() - START_LAG_S:
        raise AwsError("Validation", "The StartDate you specify cannot be earlier than 5 minutes ago.")
    if _role(schedule["Target"]["RoleArn"]) is None:
        raise AwsError("Validation", UNKNOWN_ROLE)


def _schedules() -> Iterator[tuple[str, Any]]:
    backends = [one for regions in list(scheduler_backends.values()) for one in list(regions.items())]
    for region, backend in backends:
        groups: list[Any] = list(backend.schedule_groups.values())
        for group in groups:
            yield from ((region, schedule) for schedule in list(group.schedules.values()))


def _period_s(expression: str) -> float:
    found = re.fullmatch(r"rate\((\d+) minutes\)", expression)
    if not found:
        raise NotImplementedError(f"the emulator models only rate(N minutes), and a schedule has {expression}")
    return 60 * float(found[1])


def _seconds(start: Any) -> float:
    """Return a time of moto's schedules, which is in seconds or in ISO 8601, in seconds."""
    return float(start) if isinstance(start, int | float) else datetime.datetime.fromisoformat(start).timestamp()


def _check_caller(role_arn: str, function_arn: str) -> None:
    """Check that EventBridge Scheduler may assume the role, and that the role may call the function."""
    role = _trusting(role_arn, "scheduler.amazonaws.com")
    statements = [one for policy in role.policies.values() for one in statements_of(policy)]
    if not is_allowed(statements, Permission("lambda:InvokeFunction", function_arn, {})):
        raise AwsError("AccessDenied", f"{role_arn} may not call {function_arn}")


def _trusting(role_arn: str, service: str) -> Any:
    """Return the role with this ARN. Raises `AwsError` if there is none, or if the service may not assume it."""
    role = _role(role_arn)
    if role is None or service not in str(json.loads(role.assume_role_policy_document)["Statement"]):
        raise AwsError("AccessDenied", f"{service} may not assume {role_arn}")
    return role


def _role(arn: str) -> Any:
    roles = iam_backends[account_of(arn)]["aws"].roles.values()
    return next((role for role in roles if role.arn == arn), None)
