"""What EC2 refuses about a launch, and moto does not: network interfaces, EFA, placement groups, unknown parameters."""

import re
from collections.abc import Mapping
from typing import Any

from moto.ec2.models import ec2_backends

from raymill.emulator.iam import AwsError
from raymill.emulator.moto_instances import ACCOUNT
from raymill.emulator.stack_resources import PLACEMENT_GROUPS

PARAMETERS = re.compile(
    r"(Action|Version|ClientToken|DryRun|ImageId|InstanceType|KeyName|MinCount|MaxCount|UserData|"
    r"IamInstanceProfile\.Name|InstanceInitiatedShutdownBehavior|MetadataOptions\.\w+|"
    r"CapacityReservationSpecification\.CapacityReservationTarget\.CapacityReservationId|"
    r"LaunchTemplate\.(LaunchTemplateName|Version)|InstanceMarketOptions\.MarketType|Placement\.GroupName|"
    r"CapacityReservationSpecification\.CapacityReservationTarget\.CapacityReservationId|"
    r"NetworkInterface\.\d+\.(DeviceIndex|NetworkCardIndex|InterfaceType|SubnetId|AssociatePublicIpAddress|"
    r"DeleteOnTermination|SecurityGroupId\.\d+)|"
    r"BlockDeviceMapping\.\d+\.(DeviceName|Ebs\.(VolumeSize|VolumeType|Throughput|Encrypted|DeleteOnTermination))|"
    r"TagSpecification\.\d+\.(ResourceType|Tag\.\d+\.(Key|Value)))"
)
"""The parameters of RunInstances that the emulated cloud models."""
EFA = ("efa", "efa-only")
GP3_IOPS = 3000
"""Of a gp3 volume for which no IOPS are set."""
MAX_MIB_PER_IOPS = 0.25


def check(region: str, parameters: Mapping[str, str], account: str = ACCOUNT) -> None:
    """Raise `AwsError` if EC2 would refuse this launch, or if the emulated cloud does not model one of its parameters.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
    """
    if unknown := [name for name in parameters if not PARAMETERS.fullmatch(name)]:
        text = f"the emulator does not model {unknown[0]} of RunInstances. Add it to raymill/emulator/launch_rules.py"
        raise AwsError("UnknownParameter", text)
    _check_disks(parameters)
    backend = ec2_backends[account][region]
    interfaces = network_interfaces(parameters)
    _check_interfaces(interfaces, backend.describe_instance_types([parameters["InstanceType"]])[0])
    groups = {group for interface in interfaces for key, group in interface.items() if key.startswith("SecurityGroup")}
    vpcs = {backend.get_subnet(interface["SubnetId"]).vpc_id for interface in interfaces}
    for group in groups:
        found = backend.get_security_group_from_id(group)
        if found is None or found.vpc_id not in vpcs:
            raise AwsError("InvalidParameter", f"Security group {group} and subnet belong to different networks.")
    group = parameters.get("Placement.GroupName", "")
    if group and group not in PLACEMENT_GROUPS:
        raise AwsError("InvalidPlacementGroup.Unknown", f"The Placement Group '{group}' is unknown.")


def network_interfaces(parameters: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the interfaces of a launch. Keys are the names in EC2's query API without their prefix."""
    return _numbered("NetworkInterface", parameters)


def _numbered(prefix: str, parameters: Mapping[str, str]) -> list[dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, value in parameters.items():
        if match := re.fullmatch(rf"{prefix}\.(\d+)\.(.*)", name):
            found.setdefault(match[1], {})[match[2]] = value
    return list(found.values())


def _check_disks(parameters: Mapping[str, str]) -> None:
    """Check the throughput of the disks. https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html"""
    for disk in _numbered("BlockDeviceMapping", parameters):
        if (throughput := disk.get("Ebs.Throughput")) is None:
            continue
        if disk.get("Ebs.VolumeType") != "gp3":
            text = f"The parameter throughput is not supported for {disk.get('Ebs.VolumeType', 'gp2')} volumes."
            raise AwsError("InvalidParameterCombination", text)
        if not 125 <= int(throughput) <= GP3_IOPS * MAX_MIB_PER_IOPS:
            text = f"Volume throughput of {throughput} MiB/s is below 125 or too high for {GP3_IOPS} IOPS"
            raise AwsError("InvalidParameterValue", text)


def _check_interfaces(interfaces: list[dict[str, str]], instance_type: Mapping[str, Any]) -> None:
    network = instance_type["NetworkInfo"]
    if len(interfaces) > 1 and any(one.get("AssociatePublicIpAddress") == "true" for one in interfaces):
        raise AwsError(
            "InvalidParameterCombination",
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network "
            "interfaces.",
        )
    with_efa = [one for one in interfaces if one.get("InterfaceType") in EFA]
    if with_efa and not network.get("EfaSupported"):
        raise AwsError(
            "InvalidParameterCombination", f"EFA interfaces are not supported on {instance_type['InstanceType']}"
        )
    if len(with_efa) > network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0):
        raise AwsError("AttachmentLimitExceeded", f"Too many EFA interfaces for {instance_type['InstanceType']}")
    slots = [(int(one.get("NetworkCardIndex", 0)), int(one["DeviceIndex"])) for one in interfaces]
    if len(set(slots)) < len(slots) or any(card >= network["MaximumNetworkCards"] for card, _ in slots):
        raise AwsError("InvalidParameterValue", f"Invalid network card or device indexes: {slots}")
    if (0, 0) not in slots or any(card > 0 and device == 0 for card, device in slots):
        raise AwsError("InvalidParameterValue", "Device index 0 belongs to the primary interface, on network card 0")
    if any(
        one.get("InterfaceType") == "efa-only" and slot == (0, 0) for one, slot in zip(interfaces, slots, strict=True)
    ):
        raise AwsError("InvalidParameterCombination", "The primary network interface cannot be efa-only")
