"""Test the load balancer: it exists only if there is a certificate, and it forwards requests to the head."""

from collections.abc import Iterator
from typing import Any

import pytest

from raymill import settings
from raymill.aws import key_pair, load_balancer, prepare, stack, vpc
from raymill.common import cluster_file
from raymill.common.cluster_file import ClusterFile
from raymill.emulator import moto_instances, stack_resources
from raymill.errors import UserError
from raymill.ray_support.aws_sections import NetworkSection

CERTIFICATE = "arn:aws:acm:us-east-1:123456789012:certificate/0a1b2c3d-0000-0000-0000-000000000000"


@pytest.fixture
def file(aws_in_this_process: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterFile]:
    """Yield the cluster file. Moto simulates AWS, with the tests' bucket."""
    monkeypatch.setattr(key_pair, "ensure", lambda file, owner: None)
    monkeypatch.setattr(prepare, "_own_address", lambda: "192.0.2.1")
    stack_resources.refuse_unmodeled(stack.template(efa_cards=4, makes_network=True))
    file = cluster_file.load()
    moto_instances.publish_image(file.region, moto_instances.IMAGE)
    yield file
    prepare.delete(file)


def prepare_with(file: ClusterFile, monkeypatch: pytest.MonkeyPatch, **network: str) -> None:
    section = NetworkSection(**network)
    real = settings.load

    def load(section_type: Any, *names: str, **options: Any) -> Any:
        return section if names == ("network",) else real(section_type, *names, **options)

    monkeypatch.setattr(settings, "load", load)
    prepare.prepare(file)


def balancers(file: ClusterFile) -> list[Any]:
    return file.client("elbv2").describe_load_balancers()["LoadBalancers"]


def test_without_a_certificate_there_is_no_load_balancer(file: ClusterFile, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_with(file, monkeypatch)
    assert balancers(file) == []
    load_balancer.register(file, "i-0123456789abcdef0")  # does nothing


def test_the_load_balancer_forwards_requests_to_the_head(
    file: ClusterFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = file.client("acm").request_certificate(DomainName="llm.example.org")["CertificateArn"]
    prepare_with(file, monkeypatch, certificate=certificate, clients="198.51.100.0/24")
    (balancer,) = balancers(file)
    made = file.client("ec2").run_instances(ImageId=moto_instances.IMAGE, MinCount=1, MaxCount=1)
    head = made["Instances"][0]["InstanceId"]
    load_balancer.register(file, head)
    elb = file.client("elbv2")
    (listener,) = elb.describe_listeners(LoadBalancerArn=balancer["LoadBalancerArn"])["Listeners"]
    assert (listener["Port"], listener["Protocol"]) == (443, "HTTPS")
    assert listener["Certificates"] == [{"CertificateArn": certificate}]
    (target,) = elb.describe_target_health(TargetGroupArn=listener["DefaultActions"][0]["TargetGroupArn"])[
        "TargetHealthDescriptions"
    ]
    assert (target["Target"]["Id"], target["Target"]["Port"]) == (head, 8000)
    groups = file.client("ec2").describe_security_groups(GroupIds=balancer["SecurityGroups"])["SecurityGroups"]
    assert [rule["CidrIp"] for group in groups for each in group["IpPermissions"] for rule in each["IpRanges"]] == [
        "198.51.100.0/24"
    ]
    assert f"https: {balancer['DNSName']} forwards requests" in capsys.readouterr().out
    prepare.delete(file)
    assert balancers(file) == []


@pytest.mark.parametrize("network", [{"certificate": CERTIFICATE}, {"clients": "198.51.100.0/24"}])
def test_certificate_and_clients_go_together(network: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="set both certificate and clients"):
        NetworkSection(**network)


def test_a_load_balancer_needs_two_zones() -> None:
    section = NetworkSection(certificate=CERTIFICATE, clients="198.51.100.0/24")
    with pytest.raises(UserError, match="a load balancer needs two zones"):
        load_balancer.stack_parameters(section, vpc.Network(["us-east-1a"] * 3))
