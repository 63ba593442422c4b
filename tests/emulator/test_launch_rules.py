"""Test that the emulated EC2 refuses launches that EC2 refuses."""

import contextlib
from collections.abc import Iterator

import pytest
from moto import mock_aws
from moto.ec2.models import ec2_backends

from raymill.emulator import iam, launches
from raymill.emulator.moto_instances import ACCOUNT

REGION = "us-east-1"


@pytest.fixture
def launch() -> Iterator[dict[str, str]]:
    """Yield the parameters of a launch that EC2 accepts."""
    with mock_aws():
        ec2 = ec2_backends[ACCOUNT][REGION]
        (vpc,) = ec2.describe_vpcs()
        subnet = next(one for one in ec2.describe_subnets() if one.availability_zone == f"{REGION}a")
        group = ec2.create_security_group("mine", "mine", vpc_id=vpc.id)
        yield {
            **{"InstanceType": "p4d.24xlarge", "ImageId": "ami-1", "MinCount": "1", "MaxCount": "1"},
            **interface(1, SubnetId=subnet.id, InterfaceType="efa", AssociatePublicIpAddress="true"),
            "NetworkInterface.1.SecurityGroupId.1": group.id,
        }


def interface(number: int, **values: str) -> dict[str, str]:
    """Return the parameters of a network interface: the first on card 0, each further one on its own card."""
    slot = {"DeviceIndex": "0" if number == 1 else "1", "NetworkCardIndex": str(number - 1)}
    return {f"NetworkInterface.{number}.{key}": value for key, value in (slot | values).items()}


def second(launch: dict[str, str], **values: str) -> dict[str, str]:
    return launch | interface(2, SubnetId=launch["NetworkInterface.1.SubnetId"], **values)


def test_one_public_interface_with_efa_is_accepted(launch: dict[str, str]) -> None:
    launches.check(REGION, launch)


def test_private_interfaces_on_all_cards_are_accepted(launch: dict[str, str]) -> None:
    launches.check(
        REGION, second(launch, InterfaceType="efa-only") | {"NetworkInterface.1.AssociatePublicIpAddress": "false"}
    )


def test_several_interfaces_get_no_public_address(launch: dict[str, str]) -> None:
    with pytest.raises(iam.AwsError, match="associatePublicIPAddress"):
        launches.check(REGION, second(launch, InterfaceType="efa-only"))


def test_a_type_without_efa(launch: dict[str, str]) -> None:
    with pytest.raises(iam.AwsError, match=r"not supported on m6i\.2xlarge"):
        launches.check(REGION, launch | {"InstanceType": "m6i.2xlarge"})


@pytest.mark.parametrize(
    "change",
    [
        {"NetworkInterface.1.DeviceIndex": "1"},  # there is no primary interface
        {"NetworkInterface.1.NetworkCardIndex": "4"},  # a p4d has cards 0 to 3
        {"NetworkInterface.1.InterfaceType": "efa-only"},
    ],
)
def test_invalid_interfaces(launch: dict[str, str], change: dict[str, str]) -> None:
    with pytest.raises(iam.AwsError):
        launches.check(REGION, launch | change)


def test_a_group_of_another_vpc(launch: dict[str, str]) -> None:
    ec2 = ec2_backends[ACCOUNT][REGION]
    group = ec2.create_security_group("other", "other", vpc_id=ec2.create_vpc("10.0.0.0/16").id)
    with pytest.raises(iam.AwsError, match="belong to different networks"):
        launches.check(REGION, launch | {"NetworkInterface.1.SecurityGroupId.1": group.id})


def test_an_unknown_placement_group(launch: dict[str, str]) -> None:
    with pytest.raises(iam.AwsError, match="Placement Group 'mine' is unknown"):
        launches.check(REGION, launch | {"Placement.GroupName": "mine"})


def test_a_parameter_that_is_not_modeled(launch: dict[str, str]) -> None:
    with pytest.raises(iam.AwsError, match=r"does not model BlockDeviceMapping\.1\.Ebs\.Iops"):
        launches.check(REGION, launch | {"BlockDeviceMapping.1.Ebs.Iops": "16000"})


@pytest.mark.parametrize(
    ("volume_type", "throughput", "accepted"),
    [("gp3", "500", True), ("gp3", "751", False), ("gp3", "124", False), ("gp2", "500", False)],
)
def test_the_throughput_of_a_disk(launch: dict[str, str], volume_type: str, throughput: str, *, accepted: bool) -> None:
    disk = {"BlockDeviceMapping.1.Ebs.VolumeType": volume_type, "BlockDeviceMapping.1.Ebs.Throughput": throughput}
    with contextlib.nullcontext() if accepted else pytest.raises(iam.AwsError, match="throughput"):
        launches.check(REGION, launch | disk)
