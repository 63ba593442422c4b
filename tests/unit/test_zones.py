"""Test in which zones the cluster starts its instances, and what the doctor says if a zone lacks a type."""

from types import SimpleNamespace
from typing import Any

import pytest

from raymill.aws import stack, vpc, zones
from raymill.aws.vpc import Network
from raymill.common import prices
from raymill.common.cluster_file import ClusterFile
from raymill.errors import UserError
from raymill.ray_support.aws_sections import NetworkSection

HEAD, CPU, GPU, FALLBACK, SERVING = "m6i.2xlarge", "m6i.8xlarge", "p5.48xlarge", "p4d.24xlarge", "g6e.xlarge"
PRICES = dict(zip("abcdef", (6.0, 5.0, 4.0, 3.0, 2.0, 1.0), strict=True))
NO_SUBNETS = NetworkSection()


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what AWS answers: the zones of the stack, if there is one, and a subnet in each zone."""
    answers = SimpleNamespace(stack="")

    def find(file: ClusterFile) -> dict[str, Any] | None:
        pairs = [(f"Zone{number}", f"us-east-1{letter}") for number, letter in enumerate(answers.stack, 1)]
        named = [{"ParameterKey": key, "ParameterValue": value} for key, value in pairs]
        return {"StackStatus": "CREATE_COMPLETE", "Parameters": named} if named else None

    def describe(SubnetIds: list[str]) -> dict[str, Any]:
        return {"Subnets": [{"SubnetId": one, "VpcId": "vpc-1", "AvailabilityZone": one[-10:]} for one in SubnetIds]}

    dollars = {f"us-east-1{letter}": price for letter, price in PRICES.items()}
    monkeypatch.setattr(prices, "spot_prices", lambda file, names: dict.fromkeys(names, dollars))
    monkeypatch.setattr(stack, "find", find)
    monkeypatch.setattr(ClusterFile, "client", lambda self, service: SimpleNamespace(describe_subnets=describe))
    return answers


def cluster(*more: str, serving: str = "") -> ClusterFile:
    """Return a file with a head, CPU workers and GPU workers in three zones, which prefer GPU to `more` types."""
    types: dict[str, Any] = {"head": {"node_config": {"InstanceType": HEAD}}}
    types["cpu"] = {"node_config": {"InstanceType": CPU}}
    labelled = [("serve_zone", serving)] if serving else []
    for label, name in [*labelled, *(("zone", name) for name in (*more, GPU))]:
        for number in "123":
            types[f"{name}-{number}"] = {"node_config": {"InstanceType": name}, "labels": {label: number}}
    content = {"cluster_name": "my-llm", "max_workers": 2, "provider": {"region": "us-east-1"}}
    return ClusterFile(content | {"head_node_type": "head", "available_node_types": types}, "digest")


def offers(**letters: str) -> dict[str, set[str]]:
    """Return where each type is offered, by the letters of the zones."""
    names = {"head": HEAD, "cpu": CPU, "gpu": GPU, "fallback": FALLBACK, "serving": SERVING}
    return {names[key]: {f"us-east-1{letter}" for letter in value} for key, value in letters.items()}


def letters(network: Network) -> str:
    return "".join(zone[-1] for zone in network.zones)


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        ({"head": "abcdef", "cpu": "abcdef", "gpu": "abcdef"}, "fed"),  # the cheapest three
        ({"head": "abcd", "cpu": "abcdef", "gpu": "abcdef"}, "dfe"),
        ({"head": "abcdef", "cpu": "ab", "gpu": "abcdef"}, "bfe"),
        ({"head": "abcdef", "cpu": "abcdef", "gpu": "e"}, "eee"),
        ({"head": "ab", "cpu": "bc", "gpu": "ef"}, "bfe"),  # no zone offers all
        ({"head": "a", "cpu": "b", "gpu": "ef"}, "fef"),  # no zone has the head and the CPU workers
    ],
)
def test_the_first_zone_has_the_head_and_the_cpu_workers(offered: dict[str, str], expected: str) -> None:
    assert letters(vpc.find_network(cluster(), NO_SUBNETS, offers(**offered))) == expected


@pytest.mark.parametrize(
    ("more", "offered", "expected"),
    [
        ({"more": (FALLBACK,)}, {"fallback": "abcd"}, "dcb"),
        ({"more": (FALLBACK,)}, {"fallback": "a"}, "afe"),
        ({"serving": SERVING}, {"serving": "bc"}, "cbf"),
        ({"more": (FALLBACK,), "serving": SERVING}, {"fallback": "ab", "serving": "bc"}, "bca"),
    ],
)
def test_zones_with_more_of_the_gpu_types_come_first(
    more: dict[str, Any], offered: dict[str, str], expected: str
) -> None:
    file = cluster(*more.get("more", ()), serving=more.get("serving", ""))
    everywhere = {"head": "abcdef", "cpu": "abcdef", "gpu": "abcdef"}
    assert letters(vpc.find_network(file, NO_SUBNETS, offers(**everywhere | offered))) == expected


def test_local_and_wavelength_zones_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("us-east-1b", "us-east-1-dfw-2a", "us-east-1-wl1-bos-wlz-1", "us-east-1a")
    answer = {"InstanceTypeOfferings": [{"InstanceType": GPU, "Location": name} for name in names]}
    client = SimpleNamespace(describe_instance_type_offerings=lambda **_: answer)
    monkeypatch.setattr(ClusterFile, "client", lambda self, service: client)
    assert zones.offered(cluster()) == offers(head="", cpu="", gpu="ab")


# ---------------------------------------------------------------- your own subnets


@pytest.mark.parametrize(
    ("subnets", "head_subnet", "offered", "expected", "head"),
    [
        ("eab", "", {"head": "abcd", "cpu": "abcd", "gpu": "abcdef"}, "aeb", "a"),  # in your order, but the first
        ("eab", "", {"head": "b", "cpu": "abcd", "gpu": "abcdef"}, "bea", "b"),
        ("eab", "b", {"head": "b", "cpu": "abcd", "gpu": "abcdef"}, "aeb", "b"),  # the head has its own subnet
        ("efc", "", {"head": "c", "cpu": "c", "gpu": "ef"}, "cef", "c"),  # no GPUs there, but the head must start
    ],
)
def test_the_first_subnet_is_in_a_zone_with_the_types_of_the_head_and_the_cpu_workers(
    subnets: str, head_subnet: str, offered: dict[str, str], expected: str, head: str
) -> None:
    section = own(subnets, head_subnet)
    network = vpc.find_network(cluster(), section, offers(**offered))
    assert letters(network) == expected
    assert network.head_subnet[-1] == head
    assert list(vpc.unoffered(cluster(), section, network, offers(**offered))) == []


def own(subnets: str, head_subnet: str = "") -> NetworkSection:
    """Return a section with a subnet in each of these zones."""
    ids = tuple(f"subnet-us-east-1{letter}" for letter in subnets)
    return NetworkSection(subnets=ids, head_subnet=head_subnet and f"subnet-us-east-1{head_subnet}")


# ---------------------------------------------------------------- what cannot start


def problems(file: ClusterFile, section: NetworkSection = NO_SUBNETS, **offered: str) -> list[str]:
    """Return what the doctor says about the zones."""
    everywhere = offers(**{"head": "abcdef", "cpu": "abcdef", "gpu": "abcdef"} | offered)
    network = vpc.find_network(file, section, everywhere)
    return [problem for _, problem in vpc.unoffered(file, section, network, everywhere)]


def test_a_subnet_for_the_head_in_a_zone_without_its_type() -> None:
    assert problems(cluster(), own("ab", "e"), head="abcd") == [
        "m6i.2xlarge (head) would start in us-east-1e, but only us-east-1a, us-east-1b, us-east-1c, us-east-1d offer "
        "it. In [cluster.network] of settings.toml, name a subnet in such a zone"
    ]


def test_subnets_in_zones_without_the_type_of_the_cpu_workers() -> None:
    (problem,) = problems(cluster(), own("ef", "a"), cpu="a")
    assert problem.startswith("m6i.8xlarge would start in us-east-1e, but only us-east-1a offer it. In [cluster.net")


def test_a_stack_whose_zones_lack_a_type_is_kept_until_down(aws: SimpleNamespace) -> None:
    aws.stack = "eab"
    (problem,) = problems(cluster(), head="abcd")
    assert problem.startswith("m6i.2xlarge (head) would start in us-east-1e, but only us-east-1a, us-")
    assert problem.endswith("For a stack in other zones, run: inv down --target aws   then: inv up --target aws")
    (problem,) = problems(cluster(serving=SERVING), serving="cd")
    assert "g6e.xlarge would start in us-east-1a, us-east-1b, us-east-1e, but only us-east-1c, us-east-1d" in problem
    assert problems(cluster(serving=SERVING), serving="bcd") == []


def test_a_type_that_the_region_does_not_offer() -> None:
    (problem,) = problems(cluster(), head="")
    assert "m6i.2xlarge (head) would start in us-east-1f, but no zone of us-east-1 offers it. Set another" in problem


def test_only_the_head_and_the_cpu_workers_are_refused() -> None:
    """Training and serving may have other types, which the doctor knows."""
    everywhere = offers(head="abc", cpu="abc", gpu="abc", serving="f")
    file = cluster(serving=SERVING)
    network = vpc.find_network(file, NO_SUBNETS, everywhere)
    vpc.refuse_first_zone(file, NO_SUBNETS, network, everywhere)
    with pytest.raises(UserError, match="8xlarge would start in us-east-1c, but only us-east-1b offer it"):
        vpc.refuse_first_zone(file, NO_SUBNETS, network, everywhere | offers(cpu="b"))


def test_a_reservation_has_its_own_zone() -> None:
    file = cluster()
    target = {"CapacityReservationTarget": {"CapacityReservationId": "cr-1"}}
    reserved = {"InstanceType": FALLBACK, "CapacityReservationSpecification": target}
    types = {"gpu-reserved": {"node_config": reserved, "labels": {"zone": "2"}}}
    file.content["available_node_types"] = types | file.content["available_node_types"]
    assert problems(file, fallback="") == []
