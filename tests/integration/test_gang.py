"""Test how a gang tries zones and markets, and what fits. The rehearsal, which has an autoscaler, tests `_reserve`."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from raymill.errors import UserError
from raymill.ray_support import capacity, gang

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


class SlowCluster:
    """Replaces Ray and the clock: machines of the offer are requested, then start, then are ready."""

    def __init__(self, started_s: float, ready_s: float) -> None:
        self.now, self.started_s, self.ready_s = 1000.0, 1000.0 + started_s, 1000.0 + ready_s

    def time(self) -> float:
        return self.now

    def wait(self, _: Any, timeout: float) -> tuple[list[int], list[int]]:
        self.now += timeout
        return ([1], []) if self.now >= self.ready_s else ([], [1])

    def status(self, _: str) -> SimpleNamespace:
        machine = [SimpleNamespace(ray_node_type_name="a")]
        is_started = self.now >= self.started_s
        return SimpleNamespace(
            **{"active_nodes": [], "idle_nodes": [], "failed_launches": []},
            pending_nodes=machine if is_started else [],
            pending_launches=[] if is_started else machine,
        )


@pytest.mark.parametrize(
    ("started_s", "ready_s", "failure"),
    [
        (30, 900, None),  # a long setup
        (30, 1e6, "no room for all 2 workers after 1860 s"),  # a setup that never ends
        (90, 900, "no room for all 2 workers after 60 s"),  # AWS starts no machine in time
    ],
)
def test_the_timeout_counts_until_aws_has_started_the_machines(
    monkeypatch: pytest.MonkeyPatch, started_s: float, ready_s: float, failure: str | None
) -> None:
    cluster = SlowCluster(started_s, ready_s)
    context = SimpleNamespace(gcs_address="")
    group = SimpleNamespace(ready=lambda: 0)
    monkeypatch.setenv("GANG_OFFERS", json.dumps(OFFERS))
    monkeypatch.setattr(gang, "ray", SimpleNamespace(wait=cluster.wait, get_runtime_context=lambda: context))
    monkeypatch.setattr(gang, "time", cluster)
    monkeypatch.setattr(gang, "cluster_status", cluster.status)
    monkeypatch.setattr(gang, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(gang, "remove_placement_group", lambda _: None)
    (offer, *_) = gang.offers()
    assert gang._reserve(offer, 2, {"GPU": 1}, 60) == failure


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
