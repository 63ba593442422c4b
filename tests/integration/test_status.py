"""Test what `inv status` shows, and which problems it reports, for given responses of Ray's dashboard."""

import io
import re
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from raymill import status, submission
from raymill.errors import UserError
from raymill.target import CloudStatus, Connection, NotOnCluster

CONNECTION = Connection(dashboard="http://127.0.0.1:8265", headers={}, job_variables={})
NODE: dict[str, Any] = {
    "node_ip": "10.0.0.1", "is_head_node": True, "state": "ALIVE", "state_message": None,
    "resources_total": {"CPU": 4.0},
}  # fmt: skip
JOB: dict[str, Any] = {
    "submission_id": "preprocess-1", "status": "SUCCEEDED", "start_time": 1_000, "end_time": 61_000,
    "message": "Job finished successfully.", "driver_exit_code": 0, "job_id": "01000000", "metadata": {"owner": "ada"},
}  # fmt: skip
APPLICATION: dict[str, Any] = {
    "status": "RUNNING", "route_prefix": "/", "message": "",
    "deployments": {"LLMServer:tiny": {"replicas": [{}, {}], "message": ""}},
}  # fmt: skip


def snapshot(**changes: Any) -> status.Snapshot:
    healthy: dict[str, Any] = {
        "nodes": [NODE],
        "load": {"usage": {"CPU": [1.0, 4.0]}, "resourceDemand": [], "pgDemand": []},
        "jobs": [JOB],
        "waiting": [],
        "serve": {"http_options": {"host": "127.0.0.1", "port": 8000}, "applications": {"llm": APPLICATION}},
    }
    return status.Snapshot(**(healthy | changes))


def printed(what: status.Snapshot, cloud: CloudStatus | None = None) -> str:
    console = Console(file=io.StringIO(), width=160)
    status.show(what, cloud or CloudStatus(), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_healthy_cluster_is_shown_without_problems() -> None:
    text = printed(snapshot())
    for expected in (
        "10.0.0.1",
        "head",
        "preprocess-1",
        "ada",
        "succeeded",
        "60 s",
        "http://127.0.0.1:8000",
        "tiny ×2",
    ):
        assert expected in text
    assert "no problems" in text


def test_demand_that_no_node_can_meet_is_reported() -> None:
    load = {"usage": {"CPU": [0.0, 4.0]}, "resourceDemand": [[{"CPU": 8.0}, 3]], "pgDemand": []}
    assert status.problems(snapshot(load=load)) == ["3 × 8 CPU requested, but the cluster has only 4 CPU"]
    fits = {"usage": {"CPU": [4.0, 4.0]}, "resourceDemand": [[{"CPU": 1.0}, 3]], "pgDemand": []}
    assert status.problems(snapshot(load=fits)) == []
    assert "3" in printed(snapshot(load=fits)), "pending demands are not a problem, but they are shown"


def test_a_failed_job_is_reported_with_its_exit_code_and_last_line() -> None:
    job = JOB | {"status": "FAILED", "driver_exit_code": 1, "message": "Job failed:\nerror: there is no data\n"}
    (sentence,) = status.problems(snapshot(jobs=[job]))
    assert sentence == "job preprocess-1 failed with exit code 1: error: there is no data"


def test_a_dead_node_and_an_unhealthy_application_are_reported() -> None:
    dead = NODE | {"state": "DEAD", "state_message": "health check failed"}
    assert status.problems(snapshot(nodes=[dead])) == ["node 10.0.0.1 is dead: health check failed"]
    sick = APPLICATION | {"status": "DEPLOY_FAILED", "message": "The engine\ndid not start"}
    serve = {"http_options": {}, "applications": {"llm": sick}}
    assert status.problems(snapshot(serve=serve)) == ["application llm is deploy_failed: did not start"]
    with pytest.raises(UserError, match="inv submit serve_llm"):
        status.address(snapshot(serve=serve), CONNECTION)


def test_each_job_is_shown_with_what_it_waits_for() -> None:
    gang = {"creator_job_id": "01000000", "bundles": [{"unit_resources": {"GPU": 8.0, "CPU": 4.0}}] * 2}
    task = {"job_id": "02000000", "placement_group_id": None, "required_resources": {"CPU": 30.0}}
    in_gang = {"job_id": "01000000", "placement_group_id": "a", "required_resources": {"GPU": 8.0}}
    of_serve = {"job_id": "", "placement_group_id": None, "required_resources": {"CPU": 1.0}}
    other = JOB | {"submission_id": "embed-2", "job_id": "02000000", "metadata": {"owner": "bob"}}
    text = printed(snapshot(jobs=[JOB, other], waiting=[gang, task, in_gang, task, of_serve]))
    _, _, table = text.partition("Waiting")
    assert [re.split("  +", line.strip()) for line in table.splitlines()[2:4]] == [
        ["preprocess-1", "ada", "2 × 8 GPU, 4 CPU"],
        ["embed-2", "bob", "2 × 30 CPU"],
    ]
    assert "Waiting" not in printed(snapshot())


def test_the_default_job_is_the_latest_one_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        Mock(submission_id="mine-1", start_time=1, metadata={"owner": "ada"}),
        Mock(submission_id="mine-2", start_time=2, metadata={"owner": "ada"}),
        Mock(submission_id="theirs-3", start_time=3, metadata={"owner": "bob"}),
    ]
    connection = Mock(target_option="", client=lambda: Mock(list_jobs=lambda: jobs))
    monkeypatch.setattr(submission, "user", lambda: "ada")
    assert submission.find(connection, "") == "mine-2"
    assert submission.find(connection, "theirs-3") == "theirs-3"
    monkeypatch.setattr(submission, "user", lambda: "eve")
    with pytest.raises(NotOnCluster, match="no job of eve is on this cluster"):
        submission.find(connection, "")


def test_an_unreachable_dashboard_gives_a_one_sentence_error() -> None:
    with pytest.raises(UserError, match=r"no valid response from Ray \(the connection failed\)"):
        status.snapshot(replace(CONNECTION, dashboard="http://127.0.0.1:9"))


def test_the_address_of_a_served_model_is_that_of_the_tunnel_if_there_is_one() -> None:
    assert status.address(snapshot(), CONNECTION) == "http://127.0.0.1:8000"
    tunnelled = replace(CONNECTION, forwarded_ports={8000: 23456})
    assert status.address(snapshot(), tunnelled) == "http://127.0.0.1:23456"


def test_costs_and_refused_instances_are_reported() -> None:
    cloud = CloudStatus(notes=["0.40 dollars per hour now"], problems=["AWS refused gpu-spot-1: no capacity"])
    text = printed(snapshot(), cloud)
    assert "0.40 dollars per hour now" in text
    assert "✗ AWS refused gpu-spot-1: no capacity" in text
    assert "no problems" not in text


@pytest.mark.parametrize(
    "words", ["Expected termination: drained", "Terminated due to idle (no Ray activity): partial gang"]
)
def test_a_node_that_was_ended_on_purpose_is_not_shown_as_a_problem(words: str) -> None:
    gone = NODE | {"state": "DEAD", "state_message": words}
    assert status.problems(snapshot(nodes=[gone])) == []
    assert NODE["node_ip"] not in printed(snapshot(nodes=[gone]))
