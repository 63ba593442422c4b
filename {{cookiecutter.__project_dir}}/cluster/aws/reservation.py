"""The capacity reservation that [cluster.capacity] names: a Capacity Block, or an on-demand capacity reservation.

A Capacity Block is paid in advance, for whole days, and has a start and an end.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html
"""

import datetime
from dataclasses import dataclass
from typing import Any

import botocore.exceptions
from pydantic import Field

import settings
from cluster.common.cluster_file import ClusterFile

ENDED = ("expired", "cancelled", "failed", "payment-failed", "unsupported")
"""States of a reservation in which no instance will ever start in it."""


class CapacitySection(settings.Section):
    """[cluster.capacity] of settings.toml."""

    reservation: str = ""
    """Id of a Capacity Block or an on-demand capacity reservation, as cr-0123456789abcdef0. If empty, there is none."""
    count: int = Field(0, ge=0)
    """Number of reserved instances that the cluster may use. If 0, all of them."""


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
    """None if the reservation has no end."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def find(file: ClusterFile) -> Reservation | None:
    """Return the reservation, or None if the settings name none or AWS does not know it."""
    section = load_section()
    if not section.reservation:
        return None
    try:
        answer = file.client("ec2").describe_capacity_reservations(CapacityReservationIds=[section.reservation])
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"].startswith("InvalidCapacityReservationId"):
            return None
        raise
    return _from_ec2(answer["CapacityReservations"][0], section.count)


def load_section() -> CapacitySection:
    return settings.load(CapacitySection, "capacity", profile="cluster")


def _from_ec2(described: dict[str, Any], count: int) -> Reservation:
    total = described["TotalInstanceCount"]
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
