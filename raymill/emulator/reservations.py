"""Capacity reservations of the emulated EC2: Capacity Blocks, their offerings, and on-demand capacity reservations.

moto lacks them. Offerings and their prices are made up. Untargeted launches never use a reservation.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
"""

import datetime
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from xml.sax.saxutils import escape

from raymill.emulator import moto_instances, stubs
from raymill.emulator.iam import AwsError
from raymill.emulator.moto_instances import ACCOUNT, MotoInstance

CLEANUP = datetime.timedelta(minutes=30)
"""AWS terminates the instances of a Capacity Block from this time before its end."""
END_HOUR = datetime.time(11, 30, tzinfo=datetime.UTC)
"""All Capacity Blocks end at this time of day."""
PRICE_RATIO = 0.8
"""Price of an hour in a Capacity Block divided by the on-demand price."""
TARGET = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"
TAGS = r"TagSpecification\.1\.Tag\.(\d+)\.Key"
RESPONSE = '<{action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">{content}</{action}Response>'
ZONES = "ab"
"""Letters of the zones that have offerings."""


@dataclass
class Reservation:
    """A Capacity Block, an on-demand capacity reservation, or an offering of a block."""

    id: str
    zone: str
    instance_type: str
    count: int
    start: datetime.datetime
    end: datetime.datetime | None = None
    is_block: bool = True
    tags: dict[str, str] = field(default_factory=dict)
    instances: set[str] = field(default_factory=set)
    """Ids of all instances that were started in it."""
    account: str = ACCOUNT
    launching: int = 0
    """Number of instances that moto is about to start."""

    @property
    def state(self) -> str:
        now = _now()
        if now < self.start:
            return "scheduled"
        return "expired" if self.end and now >= self.end else "active"

    @property
    def is_ending(self) -> bool:
        """Whether AWS terminates its instances. Those of an on-demand reservation outlive it."""
        return self.is_block and self.end is not None and _now() >= self.end - CLEANUP

    @property
    def available(self) -> int:
        """Number of instances that can still start in it."""
        living = {one.id for one in moto_instances.list_all() if one.state != "terminated"}
        return self.count - self.launching - len(self.instances & living) if self.state == "active" else 0

    @property
    def fee(self) -> float:
        assert self.end
        hours = (self.end - self.start) / datetime.timedelta(hours=1)
        return self.count * hours * PRICE_RATIO * stubs.DOLLARS_AN_HOUR[self.instance_type]


class Reservations:
    """The accounts' reservations, and the offerings that they have seen."""

    def __init__(self) -> None:
        self._by_id: dict[str, Reservation] = {}
        self._offerings: dict[str, Reservation] = {}
        self._lock = threading.Lock()

    def respond(self, action: str, region: str, parameters: dict[str, str], account: str = ACCOUNT) -> str | None:
        """Return the response body, or None if the call is not about reservations. Raises `AwsError`."""
        if action == "DescribeCapacityReservations":
            found = "".join(f"<item>{_fields(one)}</item>" for one in self._selected(parameters, account, region))
            content = f"<capacityReservationSet>{found}</capacityReservationSet>"
        elif action == "DescribeCapacityBlockOfferings":
            offered = list(_offerings(region, parameters))
            self._offerings |= {offering.id: offering for offering in offered}
            content = f"<capacityBlockOfferingSet>{''.join(map(_offering_item, offered))}</capacityBlockOfferingSet>"
        elif action == "PurchaseCapacityBlock":
            content = f"<capacityReservation>{_fields(self._purchase(parameters, account))}</capacityReservation>"
        else:
            return None
        return RESPONSE.format(action=action, content=content)

    def put(self, reservation_id: str, *, start_s: float, end_s: float | None, **values: Any) -> None:
        """Create a reservation, or change an existing one. Its start and its end are in seconds from now.

        `values` are fields of `Reservation`.
        """
        values["start"] = _now() + datetime.timedelta(seconds=start_s)
        values["end"] = None if end_s is None else _now() + datetime.timedelta(seconds=end_s)
        existing = self._by_id.get(reservation_id)
        self._by_id[reservation_id] = replace(existing, **values) if existing else Reservation(reservation_id, **values)

    def of(self, instance_id: str) -> Reservation | None:
        """Return the reservation in which an instance was started, or None."""
        return next((one for one in self._by_id.values() if instance_id in one.instances), None)

    def admit(
        self, launch: dict[str, str], reservation_id: str, parameters: dict[str, str], account: str = ACCOUNT
    ) -> int:
        """Return how many instances of a launch can start in a reservation. After the launch, call `note_launch`.

        Args:
            launch: has the keys zone, market and type.

        Raises:
            AwsError: as EC2 would reject the launch. AWS's list of errors has no codes for a market that does not match
                the reservation, and for a reservation that has ended.
        """
        with self._lock:
            reservation = self._find(reservation_id, account)
            if (launch["market"] == "capacity-block") != reservation.is_block:
                raise AwsError("InvalidParameterCombination", "The market type does not match the reservation.")
            if reservation.state == "scheduled":
                pending = "InvalidCapacityReservationState.PendingActivation"
                raise AwsError(pending, "Your Capacity Block is not active yet.")
            if reservation.state == "expired" or reservation.is_ending:
                raise AwsError("InvalidCapacityReservationState", f"{reservation.id} has ended.")
            matches = (reservation.zone, reservation.instance_type) == (launch["zone"], launch["type"])
            admitted = min(int(parameters["MaxCount"]), reservation.available) if matches else 0
            if admitted < int(parameters["MinCount"]):
                raise AwsError(
                    "ReservationCapacityExceeded",
                    "The requested reservation does not have sufficient compatible and available capacity for this "
                    "request.",
                )
            reservation.launching += admitted
            return admitted

    def note_launch(self, reservation_id: str | None, instance_ids: list[str]) -> None:
        """Record the instances that moto started for an admitted launch. Without a reservation, this does nothing."""
        if reservation_id is None:
            return
        with self._lock:
            reservation = self._by_id[reservation_id]
            reservation.launching -= len(instance_ids)
            reservation.instances |= set(instance_ids)
        for instance in moto_instances.list_all():
            if instance.id in instance_ids:
                instance.moto.lifecycle = "capacity-block" if reservation.is_block else None  # moto sets "spot"
                instance.moto.capacity_reservation_id = reservation_id

    def end(self, instance: MotoInstance) -> bool:
        """Terminate an instance of a Capacity Block that is about to end. Return whether this was one."""
        reservation = self.of(instance.id)
        if instance.state == "running" and reservation and reservation.is_ending:
            instance.moto.terminate()
            return True
        return False

    def _find(self, reservation_id: str, account: str, region: str = "") -> Reservation:
        found = self._by_id.get(reservation_id)
        if found is None or found.account != account or not found.zone.startswith(region):
            raise AwsError(
                "InvalidCapacityReservationId.NotFound", f"The capacity reservation ID {reservation_id} does not exist."
            )
        return found

    def _selected(self, parameters: dict[str, str], account: str, region: str) -> list[Reservation]:
        ids = [value for key, value in parameters.items() if re.fullmatch(r"CapacityReservationId\.\d+", key)]
        found = [self._find(one, account, region) for one in ids] or [
            one for one in self._by_id.values() if one.account == account and one.zone.startswith(region)
        ]
        tag = parameters.get("Filter.1.Name", "").removeprefix("tag:")
        return [one for one in found if not tag or one.tags.get(tag) == parameters["Filter.1.Value.1"]]

    def _purchase(self, parameters: dict[str, str], account: str) -> Reservation:
        with self._lock:
            offering = self._offerings.pop(parameters["CapacityBlockOfferingId"], None)
            if offering is None:
                raise AwsError(
                    "InvalidCapacityBlockOfferingIdNotFound", "The Capacity Block offering ID cannot be found."
                )
            numbers = [found[1] for key in parameters if (found := re.fullmatch(TAGS, key))]
            prefix = "TagSpecification.1.Tag"
            tags = {parameters[f"{prefix}.{n}.Key"]: parameters[f"{prefix}.{n}.Value"] for n in numbers}
            bought = replace(offering, id=f"cr-{secrets.token_hex(9)[:17]}", tags=tags, account=account)
            self._by_id[bought.id] = bought
            return bought


def _offerings(region: str, parameters: dict[str, str]) -> Iterator[Reservation]:
    """Yield an offering in each of two zones, the second one a day later."""
    hours, count = int(parameters["CapacityDurationHours"]), int(parameters["InstanceCount"])
    days, rest = divmod(hours, 24)
    if rest or not 1 <= days <= 182 or (days > 14 and days % 7) or not 1 <= count <= 64:
        raise AwsError("InvalidParameterValue", "The duration or the number of instances is not valid.")
    earliest = _time(parameters.get("StartDateRange")) or _now()
    latest = _time(parameters.get("EndDateRange"))
    first = datetime.datetime.combine(earliest.date(), END_HOUR)
    first += datetime.timedelta(days=1) if first < earliest else datetime.timedelta()
    for day, letter in enumerate(ZONES):
        start = first + datetime.timedelta(days=day)
        end = start + datetime.timedelta(hours=hours)
        if latest is None or end <= latest:
            offering_id = f"cb-{secrets.token_hex(9)[:17]}"
            yield Reservation(offering_id, f"{region}{letter}", parameters["InstanceType"], count, start, end)


def _fields(reservation: Reservation) -> str:
    values = {
        "capacityReservationId": reservation.id,
        "reservationType": "capacity-block" if reservation.is_block else "default",
        "state": reservation.state,
        "instanceType": reservation.instance_type,
        "instancePlatform": "Linux/UNIX",
        "availabilityZone": reservation.zone,
        "totalInstanceCount": reservation.count,
        "availableInstanceCount": reservation.available,
        "startDate": _format(reservation.start),
        "endDateType": "limited" if reservation.end else "unlimited",
        "instanceMatchCriteria": "targeted",
    } | ({"endDate": _format(reservation.end)} if reservation.end else {})
    tags = "".join(
        f"<item><key>{escape(key)}</key><value>{escape(value)}</value></item>"
        for key, value in reservation.tags.items()
    )
    return f"{_elements(values)}<tagSet>{tags}</tagSet>"


def _offering_item(offering: Reservation) -> str:
    assert offering.end
    values = {
        "capacityBlockOfferingId": offering.id,
        "instanceType": offering.instance_type,
        "availabilityZone": offering.zone,
        "instanceCount": offering.count,
        "startDate": _format(offering.start),
        "endDate": _format(offering.end),
        "capacityBlockDurationHours": (offering.end - offering.start) // datetime.timedelta(hours=1),
        "upfrontFee": f"{offering.fee:.2f}",
        "currencyCode": "USD",
        "tenancy": "default",
    }
    return f"<item>{_elements(values)}</item>"


def _elements(values: dict[str, Any]) -> str:
    return "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in values.items())


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _time(text: str | None) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(text) if text else None


def _format(time: datetime.datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z")
