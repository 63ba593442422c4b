"""Test the watchdog: which node types may be requested, what instances cost, and when the lease is renewed."""

import datetime
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sleeping import in_this_thread

from raymill import settings
from raymill.common import cluster_file
from raymill.common.limits import LimitsSection
from raymill.node import autoscaler_log, watchdog_head, watchdog_worker
from raymill.serving import haproxy, rate_limits

NOW = datetime.datetime(2026, 1, 1, 10, 0, 10).timestamp()  # in this machine's time zone, as in Ray's logs


def refusal(node_type: str, at: str) -> dict[str, str]:
    return {"type": node_type, "at": f"2026-01-01 {at}", "code": "InsufficientInstanceCapacity", "message": "no"}


@pytest.fixture
def market() -> watchdog_head.Markets:
    return watchdog_head.Markets({"spot": 2, "on-demand": 2})


def test_a_refused_type_is_closed_for_five_minutes(market: watchdog_head.Markets) -> None:
    (message,) = market.note_refusals([refusal("spot", "10:00:00")], NOW)
    assert message == "AWS refused spot (InsufficientInstanceCapacity): not requested again for 5 minutes"
    assert market.limits(Counter(), NOW + 289) == {"spot": 0, "on-demand": 2}
    assert market.limits(Counter(), NOW + 291) == {"spot": 2, "on-demand": 2}


def test_a_refusal_counts_once_however_often_ray_repeats_it(market: watchdog_head.Markets) -> None:
    early, late = refusal("spot", "10:00:00"), refusal("spot", "10:00:05")
    assert len(market.note_refusals([early, early, late], NOW)) == 1
    assert market.note_refusals([early, late], NOW + 200) == []
    assert market.note_refusals([early, late], NOW + 400) == []
    assert market.limits(Counter(), NOW + 296)["spot"] == 2


def test_a_throttled_launch_closes_no_type(market: watchdog_head.Markets) -> None:
    assert market.note_refusals([refusal("spot", "10:00:00") | {"code": "RequestLimitExceeded"}], NOW) == []
    assert market.limits(Counter(), NOW)["spot"] == 2


def test_a_launch_that_ec2_ends_closes_the_type(market: watchdog_head.Markets, monkeypatch: pytest.MonkeyPatch) -> None:
    """EC2 accepted the launches of both instances. It ended one at once, and the other when the user asked for it."""
    file = cluster_file.load()
    ended = [
        _ended("i-1", "spot", "Client.VolumeLimitExceeded: Volume limit exceeded"),
        _ended("i-2", "on-demand", "Client.UserInitiatedShutdown: User initiated shutdown"),
    ]
    monkeypatch.setattr(type(file), "client", lambda file, service: _Ec2(ended))
    refusals = watchdog_head._failed_launches(file)
    given_up = NOW + watchdog_head.REQUEST_TIMEOUT_S
    (message,) = market.note_refusals(refusals, given_up)
    assert message == "AWS refused spot (Client.VolumeLimitExceeded): not requested again for 5 minutes"
    assert market.limits(Counter(), given_up + 289) == {"spot": 0, "on-demand": 2}
    ended[0]["LaunchTime"] = datetime.datetime.now(datetime.UTC)
    assert watchdog_head._failed_launches(file) == []  # the autoscaler still waits for it


def _ended(name: str, node_type: str, reason: str) -> dict[str, Any]:
    return {
        **{"InstanceId": name, "InstanceType": "p4d.24xlarge", "ImageId": "ami-1", "State": {"Name": "terminated"}},
        "Placement": {"AvailabilityZone": "us-east-1a"},
        "LaunchTime": datetime.datetime.fromtimestamp(NOW, datetime.UTC),
        "StateReason": {"Code": reason.partition(":")[0], "Message": reason},
        "Tags": [{"Key": "ray-user-node-type", "Value": node_type}],
    }


class _Ec2:
    """Answers DescribeInstances with all instances in the states that the filter names."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        self._found = found

    def get_paginator(self, operation: str) -> "_Ec2":
        assert operation == "describe_instances"
        return self

    def paginate(self, Filters: list[dict[str, Any]]) -> list[dict[str, Any]]:
        (states,) = [one["Values"] for one in Filters if one["Name"] == "instance-state-name"]
        return [{"Reservations": [{"Instances": [one for one in self._found if one["State"]["Name"] in states]}]}]


def test_a_closed_type_keeps_running_instances(market: watchdog_head.Markets) -> None:
    market.note_refusals([refusal("spot", "10:00:00")], NOW)
    assert market.limits(Counter(spot=1), NOW)["spot"] == 1


def test_three_failed_setups_close_a_type_for_good_with_one_message(market: watchdog_head.Markets) -> None:
    assert market.note_failed_setups(Counter(spot=2)) == []
    (message,) = market.note_failed_setups(Counter(spot=3))
    assert "run again: inv up --target aws" in message
    assert market.note_failed_setups(Counter(spot=3)) == []
    market.note_refusals([refusal("spot", "10:00:00")], NOW)
    assert market.limits(Counter(), NOW + 1e9)["spot"] == 0


def test_the_lease_is_renewed_until_the_hours_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(watchdog_head, "LEASE", tmp_path / "renewed")
    monkeypatch.setattr(watchdog_head, "LAUNCHED", tmp_path / "launched")
    monkeypatch.setattr(watchdog_head, "end_cluster", lambda file, reason: ended.append(reason))
    limits, file = LimitsSection(hours=2, dollars=10), cluster_file.load()
    for file_of_lease in (watchdog_head.LEASE, watchdog_head.LAUNCHED):
        file_of_lease.touch()
    os.utime(watchdog_head.LEASE, (0, 0))
    os.utime(watchdog_head.LAUNCHED, (time.time(), time.time() - 1.9 * 3600))
    watchdog_head.renew_lease_within(limits, file)
    assert watchdog_head.LEASE.stat().st_mtime > 0
    assert ended == []
    os.utime(watchdog_head.LAUNCHED, (time.time(), time.time() - 2.1 * 3600))
    watchdog_head.renew_lease_within(limits, file)
    assert ended == ["the limit of 2 hours in settings.toml is reached"]


def test_an_invalid_settings_file_does_not_end_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is renewed under the last limits, and `inv status` shows why, once."""
    for module, name in (
        *((watchdog_head, name) for name in ("LEASE", "LAUNCHED")),
        *((watchdog_head.state, name) for name in ("STATE_FILE", "STATE_WITHOUT_DISK")),
    ):
        monkeypatch.setattr(module, name, tmp_path / name)
    watchdog_head.LAUNCHED.touch()
    monkeypatch.setattr(watchdog_head.instances, "living", lambda file: [])
    monkeypatch.setattr(watchdog_head.HeadWatchdog, "_close_node_types", lambda *_: None)
    monkeypatch.setattr(watchdog_head.Activity, "check", lambda *_: None)
    monkeypatch.setattr(watchdog_head.Spending, "add", lambda *_: 0.0)
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": tmp_path / "settings.toml"})
    (tmp_path / "settings.toml").write_text("[cluster.limits]\nhours = 2\ndollars = 10\n")
    watchdog = watchdog_head.HeadWatchdog(cluster_file.load())
    watchdog.check()
    for text in ("[cluster.limits]\nhours = 2\ndolars = 10\n", "[cluster.limits\n"):
        (tmp_path / "settings.toml").write_text(text)
        watchdog_head.LEASE.unlink()
        watchdog.check()
        watchdog_head.HeadWatchdog(cluster_file.load()).check()  # also a new one
        assert watchdog_head.LEASE.exists()
    state = watchdog_head.state.read_watchdog()
    assert state["limits"]["dollars"] == 10
    first, second = (message.partition(" ")[2] for message in state["messages"])
    assert first.startswith("the last limits still apply, because settings.toml line 3, key cluster.limits.dolars: no")
    assert second.startswith("the last limits still apply, because settings.toml is not valid TOML")


def test_limits_are_written_atomically_if_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "ray.yaml"
    config.write_text(json.dumps({"available_node_types": {"spot": {"max_workers": 2}, "head": {"max_workers": 0}}}))
    monkeypatch.setattr(watchdog_head, "RAY_CONFIG", config)
    before = config.stat().st_ino
    watchdog_head.write_limits({"spot": 2})
    assert config.stat().st_ino == before
    watchdog_head.write_limits({"spot": 0})
    assert json.loads(config.read_text())["available_node_types"] == {
        "spot": {"max_workers": 0},
        "head": {"max_workers": 0},
    }
    assert list(tmp_path.iterdir()) == [config]


def test_refusals_are_read_with_the_code_from_aws() -> None:
    log = (
        "2026-01-01 10:00:05,880\tINFO node_provider.py:491 -- Failed to launch 2 nodes of type gpu-spot-1: "
        "Node Launch Exception (InsufficientInstanceCapacity): We currently do not have enough.\n"
    )
    assert autoscaler_log.refusals(log) == [
        {
            "type": "gpu-spot-1",
            "at": "2026-01-01 10:00:05",
            "code": "InsufficientInstanceCapacity",
            "message": "We currently do not have enough.",
        }
    ]


def test_codes_of_refusals_may_have_dots() -> None:
    code = "InvalidCapacityReservationState.PendingActivation"
    log = "2026-01-01 10:00:05,880\tINFO node_provider.py:491 -- Failed to launch 1 nodes of type gpu-reserved: "
    log += f"Node Launch Exception ({code}): Your Capacity Block is not active yet.\n"
    assert [refused["code"] for refused in autoscaler_log.refusals(log)] == [code]


@pytest.mark.parametrize(("minutes_left", "is_soon"), [(40.5, False), (39.9, True), (0, True)])
def test_a_worker_is_drained_40_minutes_before_its_capacity_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes_left: float, is_soon: bool
) -> None:
    monkeypatch.setattr(watchdog_worker, "BLOCK_END", tmp_path / "block-end")
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=minutes_left)
    (tmp_path / "block-end").write_text(f"{end.isoformat()}\n")
    cleanup = end - datetime.timedelta(minutes=30)
    assert watchdog_worker.block_notice() == (cleanup.isoformat() if is_soon else None)


def test_outside_a_capacity_block_there_is_no_such_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_worker, "BLOCK_END", tmp_path / "block-end")
    assert watchdog_worker.block_notice() is None


def test_failed_setups_are_read_with_the_last_lines_of_output() -> None:
    log = """\
2026-01-01 10:00:00,000\tINFO updater.py:1 -- Running `make world`
compiling
error: no space left on device
2026-01-01 10:00:01,000\tINFO log_timer.py:25 -- NodeUpdater: i-0a1: Setup commands failed [LogTimer=2ms]
2026-01-01 10:00:02,000\tINFO log_timer.py:25 -- NodeUpdater: i-0b2: Ray start commands failed [LogTimer=2ms]
"""
    ended = "Update instance RAY_INSTALLING->TERMINATING (id=0, type=cpu, cloud_instance_id=i-0a1, ray_id=): not needed"
    assert autoscaler_log.failed_setups(log, ended) == ["i-0b2: ray start commands failed: no output"]
    assert autoscaler_log.failed_setups(log, "") == [
        "i-0a1: setup commands failed: compiling / error: no space left on device",
        "i-0b2: ray start commands failed: no output",
    ]


class Over(Exception):
    """Ends a watchdog that would run until the machine's end."""


@pytest.mark.parametrize(
    ("notice_s", "refused", "expected"),
    [
        (118.0, 0, [(0, "late"), (90, "real")]),
        (118.0, 1, [(0, "late"), (5, "late"), (90, "real")]),  # the head did not answer at first
        (20.0, 0, [(0, "real")]),
        (598.0, 0, [(0, "late"), (570, "real")]),  # of a Capacity Block
    ],
)
def test_ray_learns_the_real_end_of_a_machine_only_shortly_before(
    notice_s: float, refused: int, expected: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, Serve would stop the machine's replica at once, even if it is the only one."""
    start, slept, told, sent = time.time(), [0.0], list[tuple[int, str]](), list[str]()
    notice = datetime.datetime.fromtimestamp(start + notice_s, datetime.UTC).isoformat()

    def sleep(seconds: float) -> None:
        slept[0] += seconds
        if slept[0] > notice_s:
            raise Over

    def drain(head: str, at: str, deadline_s: float) -> bool:
        left = notice_s - slept[0]
        is_late = deadline_s - haproxy.MAX_REQUEST_TIMEOUT_S - rate_limits.SHUTDOWN_MARGIN_S > left
        assert is_late or abs(deadline_s - left) < 1
        told.append((round(slept[0]), "late" if is_late else "real"))
        return len(told) > refused

    monkeypatch.setattr(watchdog_worker, "answers", lambda head: False)
    monkeypatch.setattr(watchdog_worker, "spot_notice", lambda: notice)
    monkeypatch.setattr(watchdog_worker, "drain", drain)
    monkeypatch.setattr(watchdog_worker.notices, "send", sent.append)
    monkeypatch.setattr(time, "time", lambda: start + slept[0])
    monkeypatch.setattr(time, "sleep", in_this_thread(sleep))
    with pytest.raises(Over):
        watchdog_worker.watch("10.0.0.1")
    assert told == expected
    assert len(sent) == 1
