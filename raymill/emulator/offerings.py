"""Which instance types the zones of the emulated EC2 offer, by moto's copy of EC2's table, and launches elsewhere.

EC2 also lists its Local Zones, in which most accounts can launch nothing. Each region has one here.
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypeOfferings.html
"""

import re
from collections.abc import Mapping, Sequence

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

from raymill.emulator.iam import AwsError
from raymill.instance_types import INSTANCE_TYPES

LOCAL_ZONE = "{region}-dfw-2a"
OFFER = """<item><instanceType>{type}</instanceType><location>{zone}</location>
<locationType>availability-zone</locationType></item>"""
RESPONSE = """<DescribeInstanceTypeOfferingsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
<instanceTypeOfferingSet>{offers}</instanceTypeOfferingSet></DescribeInstanceTypeOfferingsResponse>"""

Removed = Sequence[Mapping[str, str]]
"""Pairs of `type` and `zone` that a test has taken from the offerings."""


def zones(region: str, instance_type: str, removed: Removed) -> list[str]:
    """Return the Availability Zones that offer an instance type."""
    offers = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    found = [one["Location"] for one in offers if one["InstanceType"] == instance_type]
    return sorted(zone for zone in found if {"type": instance_type, "zone": zone} not in removed)


def describe(region: str, parameters: Mapping[str, str], removed: Removed) -> str:
    """Return the response to DescribeInstanceTypeOfferings for the filter `instance-type`."""
    types = [value for key, value in parameters.items() if re.fullmatch(r"Filter\.1\.Value\.\d+", key)]
    offers = [(one, zone) for one in types for zone in zones(region, one, removed)]
    offers += [(one, LOCAL_ZONE.format(region=region)) for one in types if one in INSTANCE_TYPES]
    return RESPONSE.format(offers="".join(OFFER.format(type=one, zone=zone) for one, zone in offers))


def check(region: str, instance_type: str, zone: str, removed: Removed) -> None:
    """Raise `AwsError`, with EC2's words, if the zone of a launch does not offer its instance type.

    https://repost.aws/knowledge-center/ec2-instance-type-not-supported-az-error
    """
    offering = zones(region, instance_type, removed)
    if zone not in offering:
        raise AwsError(
            "Unsupported",
            f"Your requested instance type ({instance_type}) is not supported in your requested Availability Zone "
            f"({zone}). Please retry your request by not specifying an Availability Zone or choosing "
            f"{', '.join(offering)}.",
        )
