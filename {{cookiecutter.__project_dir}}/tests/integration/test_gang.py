"""Test the order in which a gang tries zones and markets. The rehearsal, which has an autoscaler, tests `_reserve`."""

import json

import pytest

from cluster.aws import capacity
from cluster.common import cluster_file
from pipeline.ray_support import gang


def test_on_one_machine_there_is_nothing_to_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANG_OFFERS", raising=False)
    assert gang.offers() == []
    assert gang.gather(2, {"CPU": 1}, 10, gang.offers()) is None


def test_every_zone_of_the_cheaper_market_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANG_OFFERS", json.dumps(capacity.offers(cluster_file.load())))
    places = [(offer.market, offer.zone) for offer in gang.offers()]
    assert places == [(market, zone) for market in ("spot", "on-demand") for zone in "123"]


@pytest.mark.usefixtures("ray_session")  # `gather` lists Ray's nodes
def test_after_a_refusal_the_next_zone_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = [gang.Offer("a", "1", "spot"), gang.Offer("b", "2", "spot")]
    failures = {"1": "AWS refuses machines", "2": None}
    monkeypatch.setattr(gang, "_reserve", lambda offer, *_: failures[offer.zone])
    assert gang.gather(2, {"CPU": 1}, 10, candidates) == {"zone": "2"}
    printed = capsys.readouterr().out
    assert "zone 1, spot: AWS refuses machines; trying the next" in printed
