"""Test the file for Ray's launcher: cluster.yaml with the node types that the settings add."""

import dataclasses
import datetime
from pathlib import Path

import pytest
import yaml

from raymill.aws import launcher_file, reservation, vpc
from raymill.aws.reservation import Reservation
from raymill.common import cluster_file
from raymill.common.cluster_file import ClusterFile, NodeType
from raymill.node import state

NOW = datetime.datetime.now(datetime.UTC)
END = NOW + datetime.timedelta(hours=24)
BLOCK = Reservation(
    id="cr-1",
    state="active",
    is_block=True,
    zone="us-east-1b",
    instance_type="p5.48xlarge",
    count=1,
    start=NOW,
    end=END,
)


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    found = vpc.Network(["us-east-1a", "us-east-1b", "us-east-1a"])
    monkeypatch.setattr(vpc, "find_network", lambda file, section: found)


def resolved_with(reserved: Reservation | None, monkeypatch: pytest.MonkeyPatch) -> ClusterFile:
    monkeypatch.setattr(reservation, "find", lambda file: reserved)
    return launcher_file.load()


def reserved_type(file: ClusterFile) -> NodeType:
    return next(worker for worker in file.workers if worker.name == launcher_file.RESERVED)


def test_without_such_settings_the_file_is_cluster_yaml() -> None:
    assert launcher_file.load().content == cluster_file.load().content


def test_a_reservation_that_has_ended_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = dataclasses.replace(BLOCK, state="expired")
    assert (
        resolved_with(ended, monkeypatch).content
        == resolved_with(None, monkeypatch).content
        == cluster_file.load().content
    )


def test_a_capacity_block_adds_a_node_type_that_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    file = resolved_with(BLOCK, monkeypatch)
    added = reserved_type(file)
    assert (added.instance_type, added.market, added.zone) == ("p5.48xlarge", "capacity-block", "2")
    assert added.max_workers == 1
    assert added.priority == 3
    assert all(worker.priority < 3 for worker in file.workers if worker != added)
    target = added.node_config["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": "cr-1"}
    assert added.node_config["LaunchTemplate"]["LaunchTemplateName"] == f"{file.slug}-reserved"
    assert added.node_config["UserData"].endswith(f"\necho {END.isoformat()} > {state.BLOCK_END}\n")


def test_a_capacity_block_that_is_about_to_end_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its instances are drained 40 minutes before the end."""
    now = datetime.datetime.now(datetime.UTC)
    ending = dataclasses.replace(BLOCK, end=now + datetime.timedelta(minutes=40))
    assert resolved_with(ending, monkeypatch).content == cluster_file.load().content
    later = dataclasses.replace(BLOCK, end=now + datetime.timedelta(minutes=42))
    assert reserved_type(resolved_with(later, monkeypatch))


def test_an_on_demand_reservation_is_used_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    added = reserved_type(resolved_with(dataclasses.replace(BLOCK, is_block=False), monkeypatch))
    assert added.market == "on-demand"
    assert "InstanceMarketOptions" not in added.node_config
    assert "block-end" not in added.node_config["UserData"]  # its instances may outlive it


def test_a_reservation_in_another_zone_has_its_own_label(monkeypatch: pytest.MonkeyPatch) -> None:
    file = resolved_with(dataclasses.replace(BLOCK, zone="us-east-1f"), monkeypatch)
    assert reserved_type(file).zone == "reserved"


def test_the_digest_changes_with_the_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(BLOCK, id="cr-2")
    digests = [resolved_with(one, monkeypatch).digest for one in (BLOCK, BLOCK, other, None)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_written_file_has_the_same_content_and_is_what_nodes_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = resolved_with(BLOCK, monkeypatch)
    assert file.content["file_mounts"]["~/project/cluster/cluster.yaml"] == ".cluster/cluster.yaml"
    monkeypatch.setattr(launcher_file, "FILE", tmp_path / "new" / "cluster.yaml")
    launcher_file.write(file)
    text = launcher_file.FILE.read_text(encoding="utf-8")
    assert text.startswith("# `inv prepare` and `inv up` write this file")
    assert yaml.safe_load(text) == cluster_file.load(launcher_file.FILE).content == file.content
