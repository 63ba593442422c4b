"""Test how a gang tries zones and markets. The rehearsal, which has an autoscaler, tests `_reserve`."""

import json

import pytest

from pipeline.ray_support import gang

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
