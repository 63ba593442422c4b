"""The whole play in the emulated cloud, once, and what its record proves."""

import copy
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import settings
from cluster.common import cluster_file
from cluster.emulator import iam, sandbox
from cluster.emulator.scenario import RECORD

pytestmark = pytest.mark.skipif(bool(sandbox.missing()), reason=sandbox.missing() or "it can run here")
HEAD, WORKER = "head", "worker"
CANARY = f"canary-{secrets.token_hex(16)}"


@pytest.fixture(scope="module")
def played() -> tuple[str, dict[str, Any]]:
    """What `inv rehearse` printed, and its record."""
    RECORD.unlink(missing_ok=True)
    mounts = Path("/proc/self/mounts").read_text()
    with a_secret():
        output = verb("rehearse")
    assert Path("/proc/self/mounts").read_text() == mounts, "a mount is left on this machine"
    return output, json.loads(RECORD.read_text())


@contextmanager
def a_secret() -> Iterator[None]:
    """The canary in .env, which then is again what it was."""
    file = settings.PROJECT / ".env"
    before = file.read_text() if file.exists() else None
    file.touch(mode=0o600)
    file.write_text(f"{before or ''}\nHF_TOKEN={CANARY}\n")
    try:
        yield
    finally:
        file.unlink() if before is None else file.write_text(before)


def verb(*words: str) -> str:
    """What a verb of this project printed; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-m", "invoke", *words],
        cwd=settings.PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,  # for what hangs: minutes are usual, and a busy machine takes several times as long
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def launches(record: dict[str, Any]) -> dict[str, str]:
    """Zone of each A100 machine that was launched, by its id."""
    return {one["id"]: one["zone"] for one in record["instances"] if one["type"].startswith("p4d")}


def needs(record: dict[str, Any], role: str) -> list[iam.Need]:
    """Every permission that a role used and had."""
    asked = f"assumed-role/{cluster_file.load().slug}-{role}/"
    calls = [call for call in record["calls"] if asked in call["caller"] and not call["refused"]]
    return [iam.Need(**need) for call in calls for need in call["needs"]]


def statements(record: dict[str, Any], role: str) -> list[dict[str, Any]]:
    return record["policies"][f"{cluster_file.load().slug}-{role}"]


def granted() -> list[Any]:
    """Every action of stack.yaml's policies, for a test of each: all of them are the head's, some the worker's too."""
    text = (settings.PROJECT / "cluster" / "stack.yaml").read_text(encoding="utf-8")
    actions = sorted({word.strip('"') for word in text.replace("[", " ").replace("]", " ").replace(",", " ").split()})
    services = ("ec2:", "s3:", "ssm:", "iam:", "secretsmanager:", "pricing:")
    not_actions = {"iam:PassedToService", "ec2:CreateAction"}
    return [action for action in actions if action.startswith(services) and action.rstrip(":") not in not_actions]


def test_it_ends_with_nothing_left(played: tuple[str, dict[str, Any]]) -> None:
    output, record = played
    assert "no process, mount or network is left" in output
    assert record["left"] == []
    assert {one["state"] for one in record["instances"]} == {"terminated"}
    assert not sandbox.is_running()


def test_a_secret_travels_and_is_in_no_output_or_record(played: tuple[str, dict[str, Any]]) -> None:
    output, record = played
    assert any(call["action"] == "CreateSecret" and "HF_TOKEN" in str(call["parameters"]) for call in record["calls"])
    assert any(need.action == "secretsmanager:GetSecretValue" for need in needs(record, WORKER))
    assert CANARY not in output
    assert CANARY not in RECORD.read_text()


def test_it_tells_what_happened_when_and_what_aws_was_asked(played: tuple[str, dict[str, Any]]) -> None:
    output, _ = played
    for expected in (
        "What happened when",
        "p4d.24xlarge launched, spot",
        "What AWS was asked",
        "RunInstances",
        "at most",
    ):
        assert expected in output


def test_the_gang_was_two_spot_machines_of_one_zone(played: tuple[str, dict[str, Any]]) -> None:
    output, record = played
    assert len(launches(record)) == 2
    assert len(set(launches(record).values())) == 1
    assert "ddp on 2 x cpu" in output
    assert "step 20/20" in output


@pytest.mark.parametrize("action", granted())
def test_each_permission_is_needed(played: tuple[str, dict[str, Any]], action: str) -> None:
    """Without any single action, something that the play did would have been refused."""
    _, record = played
    without = [
        statement | {"Action": [one for one in _listed(statement["Action"]) if one != action]}
        for statement in copy.deepcopy(statements(record, HEAD))
    ]
    used = needs(record, HEAD)
    assert all(iam.is_allowed(statements(record, HEAD), need) for need in used)
    assert not all(iam.is_allowed(without, need) for need in used)


def test_a_worker_cannot_do_what_the_autoscaler_does(played: tuple[str, dict[str, Any]]) -> None:
    _, record = played
    of_the_head = [need for need in needs(record, HEAD) if need.action.startswith(("ec2:", "iam:"))]
    assert of_the_head
    assert not any(iam.is_allowed(statements(record, WORKER), need) for need in of_the_head)


def test_the_head_ends_only_what_carries_the_projects_tag(played: tuple[str, dict[str, Any]]) -> None:
    _, record = played
    ending = [need for need in needs(record, HEAD) if need.action == "ec2:TerminateInstances"]
    assert ending
    for need in ending:
        stranger = iam.Need(need.action, need.resource, {"aws:ResourceTag/ray-project": "somebody-elses"})
        assert not iam.is_allowed(statements(record, HEAD), stranger)


def test_faults_are_answered() -> None:
    """Two rows of the drill; `inv drill` runs all."""
    assert verb("drill", "--only", "no spot capacity in the first zone,head lost").count("✓") == 2


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
