"""What the steward decides: which node types may be asked for, and what the machines have cost."""

import json
from collections import Counter
from pathlib import Path

import pytest

from cluster import head_report, steward

NOW = 1_000_000.0


def refusal(node_type: str, at: str) -> dict[str, str]:
    return {"type": node_type, "at": at, "code": "InsufficientInstanceCapacity", "words": "no"}


@pytest.fixture
def market() -> steward.Market:
    return steward.Market({"spot": 2, "on-demand": 2})


def test_a_refused_type_is_closed_for_five_minutes(market: steward.Market) -> None:
    (said,) = market.note_refusals([refusal("spot", "10:00:00")], NOW)
    assert said == "AWS refused spot (InsufficientInstanceCapacity): closed for 5 minutes"
    assert market.limits(Counter(), NOW + 299) == {"spot": 0, "on-demand": 2}
    assert market.limits(Counter(), NOW + 301) == {"spot": 2, "on-demand": 2}


def test_a_refusal_counts_once_however_often_ray_repeats_it(market: steward.Market) -> None:
    early, late = refusal("spot", "10:00:00"), refusal("spot", "10:00:05")
    assert len(market.note_refusals([early, early, late], NOW)) == 1
    assert market.note_refusals([early, late], NOW + 200) == []
    assert market.limits(Counter(), NOW + 301)["spot"] == 2


def test_a_closed_type_keeps_the_machines_that_run(market: steward.Market) -> None:
    market.note_refusals([refusal("spot", "10:00:00")], NOW)
    assert market.limits(Counter(spot=1), NOW)["spot"] == 1


def test_three_failed_setups_close_a_type_for_good_and_are_said_once(market: steward.Market) -> None:
    assert market.note_failed_setups(Counter(spot=2)) == []
    (said,) = market.note_failed_setups(Counter(spot=3))
    assert "inv up --target aws" in said
    assert market.note_failed_setups(Counter(spot=3)) == []
    market.note_refusals([refusal("spot", "10:00:00")], NOW)
    assert market.limits(Counter(), NOW + 1e9)["spot"] == 0


def test_the_meter_counts_each_machine_by_its_type() -> None:
    meter = steward.Meter({"head": 0.4, "spot": 11.0})
    meter.add(Counter(head=1, spot=2, unknown=1), 1800)
    assert meter.dollars == pytest.approx(0.2 + 11.0)
    assert meter.by_type == {"head": pytest.approx(0.2), "spot": pytest.approx(11.0), "unknown": 0.0}


def test_limits_are_written_whole_and_only_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "ray.yaml"
    config.write_text(json.dumps({"available_node_types": {"spot": {"max_workers": 2}, "head": {"max_workers": 0}}}))
    monkeypatch.setattr(steward, "RAY_CONFIG", config)
    before = config.stat().st_ino
    steward.write_limits({"spot": 2})
    assert config.stat().st_ino == before
    steward.write_limits({"spot": 0})
    assert json.loads(config.read_text())["available_node_types"] == {
        "spot": {"max_workers": 0},
        "head": {"max_workers": 0},
    }
    assert list(tmp_path.iterdir()) == [config]


def test_refusals_are_read_with_awss_own_code() -> None:
    log = (
        "2026-01-01 10:00:05,880\tINFO node_provider.py:491 -- Failed to launch 2 nodes of type a100-spot-1: "
        "Node Launch Exception (InsufficientInstanceCapacity): We currently do not have enough.\n"
    )
    assert head_report.refusals(log) == [
        {
            "type": "a100-spot-1",
            "at": "2026-01-01 10:00:05",
            "code": "InsufficientInstanceCapacity",
            "words": "We currently do not have enough.",
        }
    ]


def test_what_failed_on_a_new_node_is_told_with_its_last_words() -> None:
    log = """\
2026-01-01 10:00:00,000\tINFO updater.py:1 -- Running `make world`
compiling
error: no space left on device
2026-01-01 10:00:01,000\tINFO log_timer.py:25 -- NodeUpdater: i-0a1: Setup commands failed [LogTimer=2ms]
2026-01-01 10:00:02,000\tINFO log_timer.py:25 -- NodeUpdater: i-0b2: Ray start commands failed [LogTimer=2ms]
"""
    assert head_report.failed_setups(log) == [
        "i-0a1: setup commands failed: compiling / error: no space left on device",
        "i-0b2: ray start commands failed: no output",
    ]
