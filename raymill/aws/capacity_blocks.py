"""Search for Capacity Blocks that AWS offers, and buy one. `inv capacity` runs this.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-purchase.html
"""

import dataclasses
import datetime
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from raymill import settings, settings_file, state_files
from raymill.aws import consent
from raymill.aws.reservation import local
from raymill.common.cluster_file import ClusterFile, target
from raymill.common.prices import LINUX
from raymill.errors import UserError
from raymill.target import WantedBlock

OFFERINGS = settings.PROJECT / ".cluster" / "offerings.json"
"""The offerings of the last search by id, because AWS cannot describe a single offering."""
MAX_DAYS = 182


@dataclasses.dataclass(frozen=True)
class Offering:
    """A Capacity Block that can be bought."""

    id: str
    instance_type: str
    count: int
    zone: str
    start: str
    """In ISO 8601, as is `end`."""
    end: str
    hours: int
    fee: float
    """Total price, paid in advance."""
    currency: str

    @property
    def period(self) -> str:
        return " to ".join(local(datetime.datetime.fromisoformat(one)) for one in (self.start, self.end))


def show(file: ClusterFile, wanted: WantedBlock, console: Console) -> None:
    """Show the offerings, the cheapest first, and save them for `buy`.

    Raises:
        UserError: an option is wrong, or AWS has no such offering.
    """
    offerings = sorted(_search(file, wanted), key=lambda offering: offering.fee)
    OFFERINGS.parent.mkdir(exist_ok=True)
    OFFERINGS.write_text(json.dumps([dataclasses.asdict(offering) for offering in offerings]), encoding="utf-8")
    if not offerings:
        raise UserError(
            f"AWS offers no such Capacity Block in {file.region} now. Try other --days, --instances or dates"
        )
    console.print(_table(offerings))
    print(f"buy one: inv capacity --target {target()} --buy ID   AWS does not refund Capacity Blocks")


def buy(file: ClusterFile, offering_id: str, yes: bool) -> None:
    """Buy an offering of the last search after the user agrees, and write the reservation's id to settings.toml.

    Raises:
        UserError: the offering is not one of the last search, or the user does not agree.
    """
    saved = state_files.parse(OFFERINGS.read_bytes(), list[Offering]) if OFFERINGS.exists() else []
    offering = next((one for one in saved or () if one.id == offering_id), None)
    if offering is None:
        raise UserError(
            f"{offering_id} is not an offering of the last search. Search again: inv capacity --target {target()}"
        )
    print(f"{offering.count} × {offering.instance_type} in {offering.zone}, {offering.period}")
    price = f"{offering.fee:,.2f} {offering.currency}"
    consent.ask(f"pay {price} now, without a refund?", yes, f"inv capacity --target {target()} --buy {offering_id}")
    bought = file.client("ec2").purchase_capacity_block(
        CapacityBlockOfferingId=offering_id,
        InstancePlatform=LINUX,
        TagSpecifications=[
            {"ResourceType": "capacity-reservation", "Tags": [{"Key": "ray-project", "Value": file.slug}]}
        ],
    )["CapacityReservation"]["CapacityReservationId"]
    print(f"bought {bought} for {price}")
    settings_file.write({"cluster.capacity": {"reservation": bought}}, settings.FILE)
    print(f'reservation = "{bought}" is in settings.toml. Next: inv up --target {target()} --wait')


def _search(file: ClusterFile, wanted: WantedBlock) -> list[Offering]:
    if not (1 <= wanted.days <= 14 or (wanted.days % 7 == 0 and 14 < wanted.days <= MAX_DAYS)):
        raise UserError(f"--days is {wanted.days}. Use 1 to 14, or a multiple of 7 up to {MAX_DAYS}")
    request: dict[str, Any] = {
        "InstanceType": wanted.instance_type or file.workers[-1].instance_type,
        "InstanceCount": wanted.instances or file.max_workers,
        "CapacityDurationHours": 24 * wanted.days,
    }
    for key, option, day in (
        ("StartDateRange", "--earliest", wanted.earliest),
        ("EndDateRange", "--latest", wanted.latest),
    ):
        if day:
            request[key] = _date(option, day)
    pages = file.client("ec2").get_paginator("describe_capacity_block_offerings").paginate(**request)
    return [_from_ec2(one) for page in pages for one in page["CapacityBlockOfferings"]]


def _from_ec2(described: dict[str, Any]) -> Offering:
    return Offering(
        id=described["CapacityBlockOfferingId"],
        instance_type=described["InstanceType"],
        count=described["InstanceCount"],
        zone=described["AvailabilityZone"],
        start=described["StartDate"].isoformat(),
        end=described["EndDate"].isoformat(),
        hours=described["CapacityBlockDurationHours"],
        fee=float(described["UpfrontFee"]),
        currency=described["CurrencyCode"],
    )


def _table(offerings: list[Offering]) -> Table:
    title = f"Capacity Blocks of {offerings[0].count} × {offerings[0].instance_type}, paid in advance"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("id", "zone", "period", "hours", "price", "per instance and hour"):
        right = column in ("hours", "price", "per instance and hour")
        table.add_column(column, header_style="dim", justify="right" if right else "left", no_wrap=column == "id")
    for one in offerings:
        each = one.fee / one.count / one.hours
        prices = f"{one.fee:,.2f} {one.currency}", f"{each:.2f} {one.currency}"
        table.add_row(one.id, one.zone, one.period, str(one.hours), *prices)
    return table


def _date(option: str, day: str) -> datetime.datetime:
    """Return the beginning of a day in this machine's time zone."""
    try:
        return datetime.datetime.fromisoformat(day).astimezone()
    except ValueError:
        raise UserError(f"{option} is {day!r}, which is not a date. Use a date such as 2026-12-31") from None
