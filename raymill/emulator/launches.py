"""Launches that EC2 refuses, and launches that it accepts and then ends.

moto accepts most of them: unknown parameters, several interfaces, EFA, a type that the zone does not offer. EC2 also
lists its Local Zones, in which most accounts can launch nothing. Each region has one here.
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypeOfferings.html
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS
from moto.ec2.models.instances import StateReason
from moto.kms.models import kms_backends

from raymill.emulator import iam
from raymill.emulator.iam import AwsError
from raymill.emulator.moto_instances import ACCOUNT, MotoInstance
from raymill.emulator.stack_resources import PLACEMENT_GROUPS
from raymill.instance_types import INSTANCE_TYPES

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
        text = f"the emulator does not model {unknown[0]} of RunInstances. Add it to raymill/emulator/launches.py"
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


LOCAL_ZONE = "{region}-dfw-2a"
OFFER = """<item><instanceType>{type}</instanceType><location>{zone}</location>
<locationType>availability-zone</locationType></item>"""
RESPONSE = """<DescribeInstanceTypeOfferingsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
<instanceTypeOfferingSet>{offers}</instanceTypeOfferingSet></DescribeInstanceTypeOfferingsResponse>"""

Removed = Sequence[Mapping[str, str]]
"""Pairs of `type` and `zone` that a test has taken from the offerings."""


def zones_with(region: str, instance_type: str, removed: Removed) -> list[str]:
    """Return the Availability Zones that offer an instance type."""
    offers = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    found = [one["Location"] for one in offers if one["InstanceType"] == instance_type]
    return sorted(zone for zone in found if {"type": instance_type, "zone": zone} not in removed)


def describe_offerings(region: str, parameters: Mapping[str, str], removed: Removed) -> str:
    """Return the response to DescribeInstanceTypeOfferings for the filter `instance-type`."""
    types = [value for key, value in parameters.items() if re.fullmatch(r"Filter\.1\.Value\.\d+", key)]
    offers = [(one, zone) for one in types for zone in zones_with(region, one, removed)]
    offers += [(one, LOCAL_ZONE.format(region=region)) for one in types if one in INSTANCE_TYPES]
    return RESPONSE.format(offers="".join(OFFER.format(type=one, zone=zone) for one, zone in offers))


def check_zone(region: str, instance_type: str, zone: str, removed: Removed) -> None:
    """Raise `AwsError`, with EC2's words, if the zone of a launch does not offer its instance type.

    https://repost.aws/knowledge-center/ec2-instance-type-not-supported-az-error
    """
    offering = zones_with(region, instance_type, removed)
    if zone not in offering:
        raise AwsError(
            "Unsupported",
            f"Your requested instance type ({instance_type}) is not supported in your requested Availability Zone "
            f"({zone}). Please retry your request by not specifying an Availability Zone or choosing "
            f"{', '.join(offering)}.",
        )


KEY_ACTIONS = ("CreateGrant", "Decrypt", "DescribeKey", "GenerateDataKeyWithoutPlaintext", "ReEncryptFrom")
"""What the caller of RunInstances must be allowed to do with the key that encrypts the disks."""
VOLUME_LIMIT = StateReason("Client.VolumeLimitExceeded: Volume limit exceeded", "Client.VolumeLimitExceeded")
KEY_NOT_USABLE = StateReason("Client.InternalError: Client error on launch", "Client.InternalError")
MANAGED_KEY = "alias/aws/ebs"


class LaunchFailures:
    """Which launches fail after EC2 has accepted them."""

    def __init__(self) -> None:
        self.without_volumes = 0
        """How many of the next instances with GPUs are beyond the account's limit of volumes."""
        self._without_key: set[str] = set()

    def note_launch(self, region: str, principal: iam.Principal, instances: Iterable[str]) -> None:
        """Note instances whose launcher may not use the customer's key for their disks."""
        key = disk_key(region, principal.account)
        context = {"kms:ViaService": f"ec2.{region}.amazonaws.com"}
        needed = [iam.Permission(f"kms:{action}", key, context) for action in KEY_ACTIONS if key != MANAGED_KEY]
        if not all(iam.is_allowed(principal.statements, one) for one in needed):
            self._without_key.update(instances)

    def end(self, instance: MotoInstance) -> bool:
        """Terminate a new instance if its launch fails. Return whether it does."""
        is_beyond_limit = bool(self.without_volumes and instance.type in INSTANCE_TYPES)
        self.without_volumes -= is_beyond_limit
        if not is_beyond_limit and instance.id not in self._without_key:
            return False
        instance.moto.terminate()
        instance.moto.state_reason = VOLUME_LIMIT if is_beyond_limit else KEY_NOT_USABLE
        return True


def disk_key(region: str, account: str = ACCOUNT) -> str:
    """Return the ARN of the customer's key that encrypts the account's disks, or MANAGED_KEY."""
    key = ec2_backends[account][region].default_kms_key_id
    kms = kms_backends[account][region]
    managed = kms.describe_key(MANAGED_KEY).arn if kms.alias_exists(MANAGED_KEY) else ""
    return MANAGED_KEY if key in ("", managed) else key
