"""Test in which zone the machines of a replica are. The fault tests, which have an autoscaler, test its machines."""

import json
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import ray

from raymill import settings
from raymill.errors import UserError
from raymill.ray_support import gang
from raymill.ray_support.private import serve as private_serve
from raymill.serving import preflight
from raymill.serving.options import ServeOptions

NODES = [
    {"instance_type": "p4d.24xlarge", "resources": {"CPU": 96, "GPU": 8, "accelerator_type:A100": 1}, "count": 4},
    {"instance_type": "m6i.8xlarge", "resources": {"CPU": 32}, "count": 4},
]
OFFERS = [{"node_type": f"gpu-spot-{zone}", "labels": {"zone": zone, "market": "spot"}} for zone in "12"]
SERVE_OFFERS = [{"node_type": f"serve-spot-{zone}", "labels": {"serve_zone": zone, "market": "spot"}} for zone in "12"]

Reserved = list[tuple[str, int, Mapping[str, float]]]
"""The zone, number of GPUs and resources of each GPU of each attempt to reserve machines."""


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> Reserved:
    """Emulate a cluster whose first zone has no room, and on which Serve does not run. Return the attempts."""
    attempts: Reserved = []

    def reserve(offer: gang.Offer, workers: int, needs: Mapping[str, float], timeout_s: float) -> str | None:
        attempts.append((offer.zone, workers, needs))
        return "AWS refuses machines" if offer.zone == "1" else None

    monkeypatch.setenv("CLUSTER_NODES", json.dumps(NODES))
    monkeypatch.setenv("GANG_OFFERS", json.dumps(OFFERS))
    monkeypatch.delenv("SERVE_OFFERS", raising=False)
    monkeypatch.setattr(gang, "_reserve", reserve)
    monkeypatch.setattr(gang, "_release", lambda offer: "")
    monkeypatch.setattr(private_serve, "client", lambda: None)
    monkeypatch.setattr(ray, "nodes", list)
    return attempts


def find_zone(machines: int, **changes: object) -> dict[str, str] | None:
    """Find a zone for replicas that need all GPUs of this many machines."""
    sizes = {"tensor_parallel_size": 8, "pipeline_parallel_size": machines}
    options = settings.load(ServeOptions, "serve", profile="cluster").model_copy(update=sizes | changes)
    return preflight.find_zone(options)


def test_a_replica_on_one_machine_may_be_in_any_zone(reserved: Reserved) -> None:
    assert find_zone(1) is None
    assert reserved == []


def test_a_replica_on_two_machines_is_in_a_zone_that_has_room(reserved: Reserved) -> None:
    assert find_zone(2, accelerator="A100") == {"zone": "2"}
    needs = {"GPU": 1, "accelerator_type:A100": 0.001}
    assert reserved == [("1", 16, needs), ("2", 16, needs)]


def test_the_zone_has_room_for_all_replicas_that_start(reserved: Reserved) -> None:
    find_zone(2, min_replicas=2)
    assert [gpus for _, gpus, _ in reserved] == [32, 32]


def test_a_type_for_serving_has_zones_too(reserved: Reserved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_OFFERS", json.dumps(SERVE_OFFERS))
    assert find_zone(2) == {"serve_zone": "2"}


def test_an_update_stays_in_its_zone_and_reserves_nothing(reserved: Reserved, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [{"state": "STARTING", "node_id": None}, {"state": "RUNNING", "node_id": "b"}]
    details = {"applications": {"llm": {"deployments": {"Server": {"replicas": replicas}}}}}
    monkeypatch.setattr(private_serve, "client", lambda: SimpleNamespace(get_serve_details=lambda: details))
    labels = {"a": {"zone": "3"}, "b": {"zone": "1", "market": "spot", "ray.io/node-id": "b"}}
    nodes = [{"NodeID": name, "Alive": True, "Labels": found} for name, found in labels.items()]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert find_zone(2) == {"zone": "1"}
    assert reserved == []
    assert find_zone(2, canary_percent=5) == {"zone": "2"}  # another app
    monkeypatch.setenv("SERVE_OFFERS", json.dumps(SERVE_OFFERS))
    assert find_zone(2) == {"serve_zone": "2"}  # other machines


def test_without_zones_nothing_is_reserved(reserved: Reserved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANG_OFFERS")
    assert find_zone(2) is None


def test_a_replica_that_the_cluster_cannot_hold_is_an_error(reserved: Reserved) -> None:
    with pytest.raises(UserError, match="a replica needs 40 GPUs, which is more than the 32 that this"):
        find_zone(5)
