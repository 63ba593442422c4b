"""Run `inv rehearse` once, and check its output and its record of all calls to the emulated AWS."""

import copy
import json
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import skeleton

from raymill import settings
from raymill.common import cluster_file
from raymill.emulator import iam, sandbox
from raymill.emulator.scenario import RECORD_FILE

pytestmark = pytest.mark.skipif(bool(sandbox.unsupported_reason()), reason=sandbox.unsupported_reason() or "supported")
HEAD, WORKER = "head", "worker"
CANARY = f"canary-{secrets.token_hex(16)}"


@pytest.fixture(scope="module")
def rehearsal() -> tuple[str, dict[str, Any]]:
    """Run `inv rehearse` with a canary, which no output may contain, as a secret. Return the output and the record."""
    mounts = Path("/proc/self/mounts").read_text()
    with skeleton.complete_project("rehearsal") as project:
        (project / ".env").touch(mode=0o600)
        (project / ".env").write_text(f"HF_TOKEN={CANARY}\n")
        done = subprocess.run(
            [sys.executable, "-m", "invoke", "rehearse"],
            cwd=project,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=3600,  # in case it hangs; it takes minutes, and several times as long on a busy machine
        )
        assert done.returncode == 0, done.stdout
        assert Path("/proc/self/mounts").read_text() == mounts, "a mount is left on this machine"
        return done.stdout, json.loads((project / RECORD_FILE.relative_to(settings.PROJECT)).read_text())


def launches(record: dict[str, Any]) -> dict[str, str]:
    """Return the zone of each A100 instance that was launched, keyed by the instance's id."""
    return {one["id"]: one["zone"] for one in record["instances"] if one["type"].startswith("p4d")}


def used_permissions(record: dict[str, Any], role: str) -> list[iam.Permission]:
    """Return every permission that the role used successfully."""
    caller = f"assumed-role/{cluster_file.load().role(role)}/"
    calls = [call for call in record["calls"] if caller in call["caller"] and not call["error_code"]]
    return [iam.Permission(**permission) for call in calls for permission in call["permissions"]]


def statements(record: dict[str, Any], role: str) -> list[dict[str, Any]]:
    return record["policies"][cluster_file.load().role(role)]


def granted_actions() -> list[Any]:
    """Return every action in stack.yaml's policies. The head's role allows all of them, and the worker's role some."""
    text = (settings.PROJECT / "cluster" / "stack.yaml").read_text(encoding="utf-8")
    actions = sorted({word.strip('"') for word in text.replace("[", " ").replace("]", " ").replace(",", " ").split()})
    services = ("ec2:", "s3:", "ssm:", "iam:", "secretsmanager:", "pricing:")
    not_actions = {"iam:PassedToService", "ec2:CreateAction"}
    not_actions.add("s3:AbortMultipartUpload")  # no upload of the rehearsal fails
    not_actions.add("ssm:GetParameters")  # plain `ray up cluster/cluster.yaml` lets the head look up the image
    return [action for action in actions if action.startswith(services) and action.rstrip(":") not in not_actions]


def test_the_rehearsal_leaves_nothing(rehearsal: tuple[str, dict[str, Any]]) -> None:
    output, record = rehearsal
    assert "no process, mount or network is left" in output
    assert record["left"] == []
    assert {one["state"] for one in record["instances"]} == {"terminated"}


def test_workers_read_a_secret_that_is_in_no_output_or_record(rehearsal: tuple[str, dict[str, Any]]) -> None:
    output, record = rehearsal
    assert any(call["action"] == "CreateSecret" and "HF_TOKEN" in str(call["parameters"]) for call in record["calls"])
    assert any(one.action == "secretsmanager:GetSecretValue" for one in used_permissions(record, WORKER))
    assert CANARY not in output
    assert CANARY not in json.dumps(record)


def test_the_rehearsal_prints_a_timeline_and_the_calls_to_aws(rehearsal: tuple[str, dict[str, Any]]) -> None:
    output, _ = rehearsal
    for expected in ("Timeline", "p4d.24xlarge launched, spot", "Calls to AWS", "RunInstances", "at most"):
        assert expected in output


def test_the_gang_was_two_spot_machines_in_one_zone(rehearsal: tuple[str, dict[str, Any]]) -> None:
    output, record = rehearsal
    assert len(launches(record)) == 2
    assert len(set(launches(record).values())) == 1
    assert "ddp on 2 x cpu" in output
    assert "step 20/20" in output


def test_the_job_is_in_the_bucket_after_the_end_of_the_cluster(rehearsal: tuple[str, dict[str, Any]]) -> None:
    output, _ = rehearsal
    past_jobs = output.partition("Past jobs")[2]
    assert re.search(r"finetune_ddp-\S+ +\S+ +succeeded", past_jobs)


@pytest.mark.parametrize("action", granted_actions())
def test_each_permission_is_needed(rehearsal: tuple[str, dict[str, Any]], action: str) -> None:
    """Without this action, the emulated AWS would have rejected at least one of the head's calls."""
    _, record = rehearsal
    without = [
        statement | {"Action": [one for one in _as_list(statement["Action"]) if one != action]}
        for statement in copy.deepcopy(statements(record, HEAD))
    ]
    used = [one for one in used_permissions(record, HEAD) if one.action == action]
    assert all(iam.is_allowed(statements(record, HEAD), permission) for permission in used)
    assert not all(iam.is_allowed(without, permission) for permission in used)


def test_a_worker_cannot_do_what_the_autoscaler_does(rehearsal: tuple[str, dict[str, Any]]) -> None:
    _, record = rehearsal
    of_the_head = [one for one in used_permissions(record, HEAD) if one.action.startswith(("ec2:", "iam:"))]
    assert of_the_head
    assert not any(iam.is_allowed(statements(record, WORKER), permission) for permission in of_the_head)


def test_the_head_can_terminate_only_instances_with_the_projects_tag(rehearsal: tuple[str, dict[str, Any]]) -> None:
    _, record = rehearsal
    terminations = [one for one in used_permissions(record, HEAD) if one.action == "ec2:TerminateInstances"]
    assert terminations
    for one in terminations:
        other_project = iam.Permission(one.action, one.resource, {"aws:ResourceTag/ray-project": "another"})
        assert not iam.is_allowed(statements(record, HEAD), other_project)


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
