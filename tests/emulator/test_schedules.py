"""Test that the emulated EventBridge Scheduler refuses what AWS refuses, and fails where it models nothing."""

import json
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.iam.models import iam_backends

from raymill.emulator import iam, schedules
from raymill.emulator.moto_instances import ACCOUNT

FUNCTION = f"arn:aws:lambda:us-east-1:{ACCOUNT}:function:guard"


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    with mock_aws():
        yield boto3.client("scheduler", "us-east-1")


def role(service: str, action: str) -> str:
    """Create a role that the service may assume and that allows the action, and return its ARN."""
    trust = {"Statement": [{"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}]}
    statement = {"Effect": "Allow", "Action": action, "Resource": "*"}
    backend = iam_backends[ACCOUNT]["aws"]
    made = backend.create_role("caller", json.dumps(trust), "/", None, "", [], "3600", None)
    backend.put_role_policy("caller", "own", json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
    return made.arn


def test_a_schedule_may_not_start_in_the_past(scheduler: Any) -> None:
    target = {"Arn": FUNCTION, "RoleArn": role("scheduler.amazonaws.com", "lambda:InvokeFunction")}
    schedules.check({"StartDate": time.time() - 200, "Target": target})
    with pytest.raises(iam.AwsError, match="cannot be earlier than 5 minutes ago"):
        schedules.check({"StartDate": time.time() - 400, "Target": target})


def test_a_schedule_needs_a_role(scheduler: Any) -> None:
    with pytest.raises(iam.AwsError, match="must allow AWS EventBridge Scheduler to assume the role"):
        schedules.check({"StartDate": time.time(), "Target": {"Arn": FUNCTION, "RoleArn": "arn:aws:iam::1:role/none"}})


@pytest.mark.parametrize(
    ("service", "action"),
    [("ec2.amazonaws.com", "lambda:InvokeFunction"), ("scheduler.amazonaws.com", "lambda:GetFunction")],
)
def test_the_role_of_a_schedule_must_allow_the_call(scheduler: Any, service: str, action: str) -> None:
    with pytest.raises(iam.AwsError, match="may not"):
        schedules._check_caller(role(service, action), FUNCTION)


def test_an_expression_that_is_not_modeled_fails(scheduler: Any) -> None:
    scheduler.create_schedule(
        Name="daily",
        ScheduleExpression="cron(0 1 * * ? *)",
        FlexibleTimeWindow={"Mode": "OFF"},
        Target={"Arn": FUNCTION, "RoleArn": role("scheduler.amazonaws.com", "lambda:InvokeFunction")},
    )
    with pytest.raises(NotImplementedError, match=r"models only rate\(N minutes\)"):
        schedules.Schedules("http://127.0.0.1:1").call_due()
