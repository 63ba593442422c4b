"""Test the GPU node types of several instance types, and the order in which training tries them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import botocore.exceptions
import pytest

from raymill.aws import capacity, launcher_file, quotas, vpc
from raymill.common import cluster_file, gpu_types, prices
from raymill.common.cluster_file import ClusterFile
from raymill.errors import UserError
from raymill.instance_types import INSTANCE_TYPES
from raymill.ray_support import aws_sections

OWN = gpu_types.in_cluster_yaml(cluster_file.load())
ZONES = [f"{cluster_file.load().region}{letter}" for letter in "abd"]
TYPES = ("p5.48xlarge", "g6e.48xlarge")

Use = Callable[..., ClusterFile]
"""Returns the cluster file with these settings in [cluster.gpu]."""


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    def use(**section: Any) -> ClusterFile:
        monkeypatch.setattr(aws_sections, "load_gpu", lambda: aws_sections.GpuSection(**section))
        return launcher_file.load()

    return use


# ------------------------------------------------------------------------------------------ node types


def test_without_settings_the_file_is_cluster_yaml(use: Use) -> None:
    assert use().content == cluster_file.load().content
    assert use(instance_types=(OWN,), serve_instance_type=OWN).content == cluster_file.load().content


def test_one_type_replaces_that_of_cluster_yaml(use: Use) -> None:
    file = use(instance_types=("g6e.12xlarge",))
    own = {worker.name: worker for worker in cluster_file.load().workers}
    assert {worker.name for worker in file.workers} == set(own)
    for worker in file.workers:
        assert worker.instance_type == ("g6e.12xlarge" if worker.zone else "m6i.8xlarge")
        assert worker.priority == own[worker.name].priority
    assert file.digest != cluster_file.load().digest
    assert gpu_types.for_training(file) == (INSTANCE_TYPES["g6e.12xlarge"],)


def test_a_preferred_type_comes_before_the_next_in_every_zone_and_market(use: Use) -> None:
    file = use(instance_types=TYPES)
    training = sorted((worker for worker in file.workers if worker.zone), key=lambda worker: -worker.priority)
    assert [(worker.instance_type, worker.market) for worker in training] == [
        (name, market) for name in TYPES for market in ("spot", "on-demand") for _ in ZONES
    ]
    assert {worker.name for worker in training} >= {"gpu-spot-1", "gpu-spot-1-g6e.48xlarge", "gpu-on-demand-3"}
    assert file.workers[-1].instance_type == TYPES[0]  # which decides on the zones


def test_a_run_never_mixes_types(use: Use) -> None:
    node_types = use(instance_types=TYPES).content["available_node_types"]
    for name, body in node_types.items():
        if name.startswith("gpu-"):
            assert body["labels"]["instance_type"] == body["node_config"]["InstanceType"]
    assert "labels" not in node_types["cpu"]


def test_serving_has_its_own_nodes_which_training_never_uses(use: Use) -> None:
    file = use(serve_instance_type="g6e.xlarge")
    serving = [worker for worker in file.workers if worker.name.startswith("serve-")]
    training = [worker for worker in file.workers if worker.zone]
    assert {worker.instance_type for worker in serving} == {"g6e.xlarge"}
    assert {worker.instance_type for worker in training} == {OWN}
    assert len(serving) == len(training) == 6
    assert max(worker.priority for worker in serving) < min(worker.priority for worker in training)
    assert [worker.market for worker in sorted(serving, key=lambda worker: -worker.priority)][:3] == ["spot"] * 3
    templates = {worker.node_config["LaunchTemplate"]["LaunchTemplateName"] for worker in serving}
    assert templates == {f"{file.slug}-serve-{zone}" for zone in "123"}  # without EFA, which g6e.xlarge lacks


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"p9\.48xlarge is not in raymill/instance_types\.py\. Use one of: p4d"):
        aws_sections.GpuSection(instance_types=("p9.48xlarge",))
    with pytest.raises(UserError, match=r"p9\.48xlarge, an InstanceType in cluster/cluster\.yaml, is not in"):
        gpu_types.find("p9.48xlarge")


# ------------------------------------------------------------------------------------------ the order of offers


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what AWS answers. By default, all zones are alike."""
    answers = SimpleNamespace(
        spot={},  # price by instance type and zone
        not_offered=set(),  # of pairs of instance type and zone
        vcpus={},  # by code of the quota
    )

    def offerings(LocationType: str, Filters: list[dict[str, Any]]) -> dict[str, Any]:
        pairs = [(name, zone) for name in Filters[0]["Values"] for zone in ZONES]
        found = [
            {"InstanceType": name, "Location": zone} for name, zone in pairs if (name, zone) not in answers.not_offered
        ]
        return {"InstanceTypeOfferings": found}

    def granted(file: ClusterFile, code: str) -> quotas.Granted:
        if isinstance(vcpus := answers.vcpus.get(code, 1000), Exception):
            raise vcpus
        return quotas.Granted("name", vcpus)

    client = SimpleNamespace(describe_instance_type_offerings=offerings)
    network = vpc.Network(zones=ZONES)
    monkeypatch.setattr(ClusterFile, "client", lambda self, service: client)
    monkeypatch.setattr(vpc, "find_network", lambda file, section, offers: network)
    monkeypatch.setattr(prices, "spot_prices", lambda file, names: answers.spot)
    monkeypatch.setattr(quotas, "granted", granted)
    return answers


def offered(file: ClusterFile) -> list[str]:
    return [offer["node_type"] for offer in capacity.offers(file)]


def test_serving_has_offers_of_its_own_type_only(aws: SimpleNamespace, use: Use) -> None:
    aws.spot = {"g6e.12xlarge": dict(zip(ZONES, (3.0, 1.0, 2.0), strict=True))}
    found = capacity.serve_offers(use(serve_instance_type="g6e.12xlarge"))
    assert [offer["node_type"] for offer in found][:3] == [f"serve-spot-{zone}" for zone in "231"]
    assert found[0]["labels"] == {"serve_zone": "2", "market": "spot"}
    assert len(found) == 6
    found = capacity.serve_offers(use(instance_types=TYPES, serve_instance_type=TYPES[1]))
    assert {offer["labels"]["instance_type"] for offer in found} == {TYPES[1]}
    assert capacity.serve_offers(use()) == []  # those for training


def test_every_zone_of_the_cheaper_market_comes_first(aws: SimpleNamespace, use: Use) -> None:
    assert offered(use()) == [f"gpu-{market}-{zone}" for market in ("spot", "on-demand") for zone in "123"]


def test_zones_with_a_lower_spot_price_come_first(aws: SimpleNamespace, use: Use) -> None:
    aws.spot = {OWN: dict(zip(ZONES, (12.0, 11.0, 10.0), strict=True))}
    assert offered(use()) == [f"gpu-{market}-{zone}" for market in ("spot", "on-demand") for zone in "321"]


def test_a_preferred_type_comes_first_whatever_its_price(aws: SimpleNamespace, use: Use) -> None:
    aws.spot = {TYPES[0]: dict.fromkeys(ZONES, 50.0), TYPES[1]: dict.fromkeys(ZONES, 1.0)}
    found = offered(use(instance_types=TYPES))
    assert found[:6] == [f"gpu-{market}-{zone}" for market in ("spot", "on-demand") for zone in "123"]
    assert found[6:] == [f"{name}-{TYPES[1]}" for name in found[:6]]


def test_serving_is_never_offered_to_training(aws: SimpleNamespace, use: Use) -> None:
    assert offered(use(serve_instance_type="g6e.xlarge")) == offered(use())


def test_a_zone_that_does_not_offer_the_type_is_left_out(aws: SimpleNamespace, use: Use) -> None:
    aws.not_offered = {(OWN, ZONES[0])}
    assert offered(use()) == [f"gpu-{market}-{zone}" for market in ("spot", "on-demand") for zone in "23"]


def test_a_market_without_quota_is_left_out(aws: SimpleNamespace, use: Use) -> None:
    quota = quotas.of(OWN, "spot")
    assert quota
    aws.vcpus = {quota.code: INSTANCE_TYPES[OWN].vcpus - 1}
    assert offered(use()) == [f"gpu-on-demand-{zone}" for zone in "123"]
    aws.vcpus = {quota.code: INSTANCE_TYPES[OWN].vcpus}
    assert len(offered(use())) == 6


def test_if_nothing_is_possible_everything_is_tried(aws: SimpleNamespace, use: Use) -> None:
    aws.not_offered = {(OWN, zone) for zone in ZONES}
    assert len(offered(use())) == 6


def test_a_quota_that_cannot_be_read_counts_as_large_enough(aws: SimpleNamespace, use: Use) -> None:
    denied = botocore.exceptions.ClientError({"Error": {"Code": "AccessDeniedException"}}, "GetServiceQuota")
    aws.vcpus = {quota.code: denied for quota in quotas.QUOTAS}
    assert len(offered(use())) == 6
