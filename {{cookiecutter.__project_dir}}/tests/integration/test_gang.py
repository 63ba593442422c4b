"""Test how a gang tries zones and markets, and what fits. The rehearsal, which has an autoscaler, tests `_reserve`."""

import json

import pytest

from pipeline.ray_support import capacity, gang
from settings import UserError

OFFERS = [
    {"node_type": "a", "labels": {"zone": "1", "market": "spot", "instance_type": "p5.48xlarge"}},
    {"node_type": "b", "labels": {"zone": "2", "market": "spot", "instance_type": "p4d.24xlarge"}},
]


def test_on_one_machine_there_is_nothing_to_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANG_OFFERS", raising=False)
    assert gang.offers() == []
    assert gang.gather(2, {"CPU": 1}, 10, gang.offers()) is None


@pytest.mark.usefixtures("ray_session")  # `gather` lists Ray's nodes
def test_after_a_refusal_the_next_zone_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GANG_OFFERS", json.dumps(OFFERS))
    failures = {"a": "AWS refuses machines", "b": None}
    monkeypatch.setattr(gang, "_reserve", lambda offer, *_: failures[offer.node_type])
    assert gang.gather(2, {"CPU": 1}, 10, gang.offers()) == {"zone": "2", "instance_type": "p4d.24xlarge"}
    printed = capsys.readouterr().out
    assert "zone 1, spot, p5.48xlarge: AWS refuses machines; trying the next" in printed


def test_a_trial_uses_the_place_that_its_search_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANG_OFFERS", json.dumps(OFFERS))
    monkeypatch.setenv("GANG_SELECTOR", '{"zone": "2"}')
    assert gang.gather(2, {"CPU": 1}, 10, gang.offers()) == {"zone": "2"}


def test_workers_with_gpus_count_only_on_one_instance_type(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"instance_type": "p4d.24xlarge", "resources": {"CPU": 96, "GPU": 8, "accelerator_type:A100": 1}, "count": 2},
        {"instance_type": "g6e.xlarge", "resources": {"CPU": 4, "GPU": 1, "accelerator_type:L40S": 1}, "count": 3},
        {"instance_type": "m6i.8xlarge", "resources": {"CPU": 32}, "count": 2},
    ]
    monkeypatch.setenv("CLUSTER_NODES", json.dumps(nodes))
    assert capacity.max_workers({"GPU": 1, "CPU": 4}) == 16
    assert capacity.max_workers({"GPU": 1, "accelerator_type:L40S": 0.001}) == 3
    assert capacity.max_workers({"CPU": 4}) == 2 * 24 + 3 + 2 * 8
    with pytest.raises(UserError, match=r"with 1 GPU for each, is more than the 3 that this cluster can hold"):
        capacity.refuse_too_many_workers(4, {"GPU": 1, "accelerator_type:L40S": 0.001})
