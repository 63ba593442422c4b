"""The capacity reservation that [cluster.capacity] names: a Capacity Block, or an on-demand capacity reservation.

A Capacity Block is paid in advance, and has a start and an end.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html
"""

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import botocore.exceptions

from raymill import settings
from raymill.aws import aws_errors, stack
from raymill.common import prices
from raymill.common.cluster_file import ClusterFile, target
from raymill.console import Console
from raymill.errors import UserError
from raymill.node.state import BLOCK_CLEANUP_S, BLOCK_NOTICE_S
from raymill.ray_support.aws_sections import CapacitySection, NetworkSection

ENDED = ("expired", "cancelling", "cancelled", "failed", "payment-failed", "unsupported")
"""States of a reservation in which no instance will ever start in it."""
QUANTITY_TAG = "aws:ec2capacityreservation:incrementalRequestedQuantity"
"""Tag with the number of instances of a Capacity Block that has not started, because its capacity is still 0."""
PARAMETERS = ("ReservedZone", "ReservedCidr", "ReservedSubnet")
"""The stack's parameters for the reservation."""
FIRST_BLOCK = 240
"""The stack's subnet for the reservation is 10.0.240.0/24 in zone a, 10.0.241.0/24 in zone b, and so on."""
POLL_S = 30
REMEDY = 'Set another id, or reservation = "", in [cluster.capacity] of settings.toml'


@dataclass(frozen=True)
class Reservation:
    """What AWS says about the reservation."""

    id: str
    state: str
    is_block: bool
    """Whether it is a Capacity Block."""
    zone: str
    instance_type: str
    count: int
    """Number of instances that the cluster may use."""
    start: datetime.datetime | None
    end: datetime.datetime | None
    """None if the reservation has no end. A Capacity Block always has one."""

    @property
    def name(self) -> str:
        return f"{'Capacity Block' if self.is_block else 'capacity reservation'} {self.id}"

    @property
    def summary(self) -> str:
        start = f" from {local(self.start)}" if self.start and not self.has_started else ""
        end = f" until {local(self.end)}" if self.end else ""
        return f"{self.name}: {self.count} × {self.instance_type} in {self.zone}{start}{end}"

    @property
    def has_started(self) -> bool:
        return self.state == "active"

    @property
    def has_ended(self) -> bool:
        """Whether no instance will start in it. In a Capacity Block, none starts after the others are drained."""
        return self.state in ENDED or (self.is_block and _now() >= self.drain)

    @property
    def drain(self) -> datetime.datetime:
        """When the watchdog drains the instances of a Capacity Block."""
        return self.cleanup - datetime.timedelta(seconds=BLOCK_NOTICE_S)

    @property
    def cleanup(self) -> datetime.datetime:
        """When AWS starts to terminate the instances of a Capacity Block."""
        assert self.end
        return self.end - datetime.timedelta(seconds=BLOCK_CLEANUP_S)


def find(file: ClusterFile) -> Reservation | None:
    """Return the reservation, or None if the settings name none or AWS does not know it."""
    section = load_section()
    described = _describe_named(file, section)
    return _from_ec2(described, section.count) if described else None


def _describe_named(file: ClusterFile, section: CapacitySection) -> dict[str, Any] | None:
    if not section.reservation:
        return None
    try:
        answer = file.client("ec2").describe_capacity_reservations(CapacityReservationIds=[section.reservation])
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"].startswith("InvalidCapacityReservationId"):
            return None
        raise
    return answer["CapacityReservations"][0]


def paid(file: ClusterFile) -> list[Reservation]:
    """Return the reservations that cost money, with all their instances.

    They are the one that the settings name, and those with the project's tag, such as a Capacity Block that
    `inv capacity` bought before.
    """
    tagged = [{"Name": "tag:ray-project", "Values": [file.slug]}]
    pages = file.client("ec2").get_paginator("describe_capacity_reservations").paginate(Filters=tagged)
    described = [one for page in pages for one in page["CapacityReservations"]]
    if named := _describe_named(file, load_section()):
        described.append(named)
    found = {one["CapacityReservationId"]: _from_ec2(one, 0) for one in described}
    return [one for one in found.values() if one.state not in ENDED]


def cost(file: ClusterFile, reserved: Reservation) -> str:
    """Say what a reservation costs without instances, and how to end that.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-pricing-billing.html
    """
    if reserved.is_block:
        return f"the {reserved.summary} is paid in advance. AWS refunds nothing, and inv up can use it until its end"
    known, _ = prices.find(file, [reserved.instance_type])
    each = known.on_demand.get(reserved.instance_type)
    unknown = f"the on-demand price of {reserved.count} instances"
    dollars = unknown if each is None else f"{reserved.count * each:.2f} dollars per hour"
    return (
        f"the {reserved.summary} costs {dollars} until you cancel it, also while no instance runs and after inv down. "
        "To cancel it, run: aws ec2 cancel-capacity-reservation "
        f"--capacity-reservation-id {reserved.id} --region {file.region}"
    )


def show_costs(file: ClusterFile) -> None:
    """Print what the project's reservations cost, which `inv down` does not end."""
    try:
        for one in paid(file):
            print(cost(file, one))
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        print(f"whether a capacity reservation still costs money is not known: {aws_errors.explain(error)}")


def require(file: ClusterFile) -> Reservation | None:
    """Return the reservation, or None if the settings name none.

    Raises:
        UserError: AWS does not know the reservation, or it has ended.
    """
    reserved, named = find(file), load_section().reservation
    if named and reserved is None:
        raise UserError(f"there is no capacity reservation {named} in {file.region}. {REMEDY}")
    if reserved and reserved.has_ended:
        how = f"ends at {local(reserved.end)}" if reserved.has_started and reserved.end else f"is {reserved.state}"
        raise UserError(f"the {reserved.name} {how}, so no instance can start in it. {REMEDY}")
    return reserved


def refuse_before_start(reserved: Reservation) -> None:
    """Raise `UserError` if the reservation has not started."""
    if not reserved.has_started:
        when = f"starts at {local(reserved.start)}" if reserved.start else f"is {reserved.state}"
        raise UserError(
            f"the {reserved.name} {when}, so nothing was started. To wait for it, run: "
            f"inv up --target {target()} --wait"
        )


def wait_for_start(file: ClusterFile) -> None:
    """Wait until the reservation has started, and show how long that takes. Raises `UserError` if it fails."""
    reserved = require(file)
    if reserved is None or reserved.has_started:
        return
    print(f"waiting for the {reserved.summary}", flush=True)
    with Console().status("") as spinner:
        while reserved and not reserved.has_started:
            left = max(datetime.timedelta(), (reserved.start or _now()) - _now())
            spinner.update(f"the {reserved.name} is {reserved.state}: {_hours(left)} until its start")
            time.sleep(POLL_S)
            reserved = require(file)


def stack_parameters(file: ClusterFile, section: NetworkSection) -> dict[str, str]:
    """Return the stack's parameters for the reservation.

    Without a reservation that can be used, an existing stack keeps its parameters, because instances of the last
    reservation may still run in its subnet.

    Raises:
        UserError: none of the user's subnets is in the reservation's zone.
    """
    reserved = find(file)
    if reserved is None or reserved.has_ended:
        known = stack.parameters(file)
        return {key: known[key] for key in PARAMETERS} if known.get("ReservedZone") else {}
    subnet = _subnet(file, section.subnets, reserved) if section.subnets else ""
    # each zone has addresses of its own, because a subnet in a new zone exists before the old one is deleted
    addresses = f"10.0.{FIRST_BLOCK + ord(reserved.zone[-1]) - ord('a')}.0/24"
    return dict(zip(PARAMETERS, (reserved.zone, addresses, subnet), strict=True))


def _subnet(file: ClusterFile, subnets: Sequence[str], reserved: Reservation) -> str:
    """Return the user's subnet in the reservation's zone."""
    described = file.client("ec2").describe_subnets(SubnetIds=list(subnets))["Subnets"]
    found = [subnet["SubnetId"] for subnet in described if subnet["AvailabilityZone"] == reserved.zone]
    if not found:
        raise UserError(
            f"none of the subnets {', '.join(subnets)} is in {reserved.zone}, the zone of the {reserved.name}. Add one "
            "to subnets in [cluster.network] of settings.toml"
        )
    return found[0]


def load_section() -> CapacitySection:
    return settings.load(CapacitySection, "capacity", profile="cluster")


def local(moment: datetime.datetime | None) -> str:
    """Format a time in this machine's time zone."""
    assert moment
    return f"{moment.astimezone():%a %d %b %H:%M}"


def _from_ec2(described: dict[str, Any], count: int) -> Reservation:
    tags = {tag["Key"]: tag["Value"] for tag in described.get("Tags", [])}
    total = described["TotalInstanceCount"] or int(tags.get(QUANTITY_TAG, 0))
    return Reservation(
        id=described["CapacityReservationId"],
        state=described["State"],
        is_block=described.get("ReservationType") == "capacity-block",
        zone=described["AvailabilityZone"],
        instance_type=described["InstanceType"],
        count=min(count or total, total),
        start=described.get("StartDate"),
        end=described.get("EndDate"),
    )


def _hours(left: datetime.timedelta) -> str:
    hours, minutes = divmod(int(left.total_seconds()) // 60, 60)
    return f"{hours} h {minutes} min"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
