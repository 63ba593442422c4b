"""Prices of instances, from AWS."""

import contextlib
import datetime
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from botocore.exceptions import BotoCoreError, ClientError
from rich.table import Table

from raymill.common import aws_session
from raymill.common.cluster_file import CAPACITY_BLOCK, ClusterFile, NodeType
from raymill.common.instances import Instance
from raymill.errors import UserError
from raymill.instance_types import INSTANCE_TYPES, highest_price

PRICING_REGION = "us-east-1"  # serves the prices of all regions
LINUX = "Linux/UNIX"


@dataclass(frozen=True)
class Prices:
    """Dollars per hour, without disks and traffic."""

    head: float
    workers: dict[str, float]
    """Maps a node type to its price. A prepaid hour costs 0.

    A spot price is the current one in the cheapest zone. Without one, it is the on-demand price, which a spot price
    never exceeds.
    """
    maximum: float
    """Price of the head and of max_workers instances of the most expensive type."""


@dataclass(frozen=True)
class MarketPrices:
    """The dollars per hour that AWS has named, without disks and traffic. A prepaid hour costs 0."""

    on_demand: dict[str, float]
    """By instance type. A type that AWS has not named is missing."""
    spot: dict[str, dict[str, float]]
    """By instance type and zone. A type is missing until AWS has answered. Its zone is missing if it has no spot price.
    """

    def of(self, instance: Instance) -> float | None:
        """Return the price of an instance in its zone and market, or None if it is unknown.

        An instance that shuts down costs nothing, and large ones take minutes.
        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html
        """
        if instance.state == "shutting-down":
            return 0.0
        return self.of_offer(instance.instance_type, instance.market, instance.zone)

    def of_offer(self, instance_type: str, market: str, zone: str) -> float | None:
        """Return the price of an instance type in a market and zone, or None if it is unknown."""
        if market == CAPACITY_BLOCK:
            return 0.0
        if market == "spot":
            if instance_type not in self.spot:
                return None
            if zone in self.spot[instance_type]:
                return self.spot[instance_type][zone]
        return self.on_demand.get(instance_type)

    def highest(self, instance_type: str) -> float:
        """Return a price that the type does not exceed: the on-demand price, or if unknown, that of INSTANCE_TYPES.

        It is also the highest price of spot instances, unless a launch names another.
        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/how-spot-instances-work.html
        """
        return self.on_demand.get(instance_type, highest_price(instance_type))

    def lowest(self, node_type: NodeType) -> float:
        """Return the price of a node type in the cheapest zone."""
        if node_type.market == CAPACITY_BLOCK:
            return 0.0
        on_demand = self.on_demand[node_type.instance_type]
        if node_type.market == "spot":
            return min(self.spot.get(node_type.instance_type, {}).values(), default=on_demand)
        return on_demand


def ask(file: ClusterFile) -> Prices:
    """Ask AWS for the prices of all node types. Raises `UserError` if one has no price in the region."""
    node_types = (file.head, *file.workers)
    known = of_market(file, {one.instance_type for one in node_types if one.market != CAPACITY_BLOCK})
    workers = {node_type.name: known.lowest(node_type) for node_type in file.workers}
    head = known.lowest(file.head)
    return Prices(head=head, workers=workers, maximum=head + file.max_workers * max(workers.values(), default=0))


def of_running(file: ClusterFile, running: Collection[Instance]) -> tuple[MarketPrices, str]:
    """Return the prices of running instances, without those that are unknown, and why they are, or "".

    Types that are only prepaid need no price, and AWS may have none.
    """
    return find(file, {one.instance_type for one in running if one.market != CAPACITY_BLOCK})


def find(file: ClusterFile, names: Collection[str]) -> tuple[MarketPrices, str]:
    """Return the prices of instance types that AWS names, and why it does not name the others, or "".

    If AWS does not answer, the other types are not asked for, because each call may take seconds. Never raises an
    exception, because the limit in dollars must not depend on the form of AWS's answers.
    """
    known, reasons = MarketPrices({}, {}), list[str]()
    try:
        spot = spot_prices(file, names)
        known.spot.update({name: spot.get(name, {}) for name in names})
    except Exception as error:
        reasons.append(str(error))
    for name in sorted(names):
        try:
            known.on_demand[name] = _on_demand(file, name)
        except (BotoCoreError, ClientError) as error:
            reasons.append(str(error))
            break
        except UserError as error:
            reasons.append(str(error))
        except Exception as error:
            reasons.append(f"AWS's answer about {name} has another form: {error!r}")
    return known, "; ".join(reasons)


def of_market(file: ClusterFile, names: Collection[str]) -> MarketPrices:
    """Return the prices of instance types in all zones. Raises `UserError` if one has no price."""
    return MarketPrices({name: _on_demand(file, name) for name in sorted(names)}, spot_prices(file, names))


def table(file: ClusterFile, prices: Prices) -> Table:
    """Return the table that `inv up` shows before it asks for consent."""
    shown = Table(title="Price, without disks and traffic", title_justify="left", title_style="bold", box=None)
    for column in ("", "instances", "market", "dollars per hour"):
        shown.add_column(column, header_style="dim", justify="right" if column.startswith("dollars") else "left")
    shown.add_row("now", f"1 × {file.head.instance_type} (head)", file.head.market, f"{prices.head:.2f}")
    seen: set[tuple[str, str]] = set()
    for worker in file.workers:
        if (key := (worker.instance_type, worker.market)) not in seen:
            seen.add(key)
            each = "prepaid" if worker.market == CAPACITY_BLOCK else f"{prices.workers[worker.name]:.2f} each"
            shown.add_row(
                "while there is work", f"0 to {worker.max_workers} × {worker.instance_type}", worker.market, each
            )
    shown.add_row("at most", f"head and {file.max_workers} of the most expensive workers", "", f"{prices.maximum:.2f}")
    return shown


def of_workers(dollars_per_instance_hour: Mapping[str, float], device: str, workers: int) -> float | None:
    """Return the hourly price of enough instances for one GPU per worker, or None if the price is unknown.

    `dollars_per_instance_hour` maps an instance type to the hourly price of an instance. `device` is the name of a GPU,
    such as "NVIDIA A100-SXM4-40GB". If several types have this GPU, the run is assumed to use the cheapest.
    """
    types = [INSTANCE_TYPES[name] for name in dollars_per_instance_hour if name in INSTANCE_TYPES]
    costs = (dollars_per_instance_hour[one.name] * one.instances(workers) for one in types if one.gpu.device == device)
    return min(costs, default=None)


def lowest(file: ClusterFile, names: Collection[str]) -> dict[str, float]:
    """Return the current hourly spot price of each instance type in its cheapest zone, or else its on-demand price.

    A type that AWS does not sell in the region is left out.
    """
    found = {name: min(zones.values()) for name, zones in spot_prices(file, names).items()}
    for name in set(names) - set(found):
        with contextlib.suppress(UserError):
            found[name] = _on_demand(file, name)
    return found


def spot_prices(file: ClusterFile, names: Collection[str]) -> dict[str, dict[str, float]]:
    """Return the current hourly spot prices by instance type and zone. A type without spot instances is left out."""
    found: dict[str, dict[str, float]] = {}
    if names:
        pages = (
            file.client("ec2")
            .get_paginator("describe_spot_price_history")
            .paginate(
                InstanceTypes=sorted(names),
                ProductDescriptions=[LINUX],
                StartTime=datetime.datetime.now(datetime.UTC),  # returns the current price of each zone
            )
        )
        for entry in (entry for page in pages for entry in page["SpotPriceHistory"]):
            found.setdefault(entry["InstanceType"], {})[entry["AvailabilityZone"]] = float(entry["SpotPrice"])
    return found


def to_order_zones(file: ClusterFile, names: Collection[str]) -> dict[str, dict[str, float]]:
    """Return what `spot_prices` returns, or {} if AWS does not answer: any order of the zones works."""
    with contextlib.suppress(BotoCoreError, ClientError):
        return spot_prices(file, names)
    return {}


def _on_demand(file: ClusterFile, instance_type: str) -> float:
    wanted = {
        "instanceType": instance_type,
        "regionCode": file.region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",  # and not "CapacityBlock", whose hours have another price
    }
    pages = (
        aws_session.client("pricing", PRICING_REGION)
        .get_paginator("get_products")
        .paginate(
            ServiceCode="AmazonEC2",
            Filters=[{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()],
        )
    )
    for product in (json.loads(text) for page in pages for text in page["PriceList"]):
        for term in product["terms"]["OnDemand"].values():
            for dimension in term["priceDimensions"].values():
                if (dollars := float(dimension["pricePerUnit"]["USD"])) > 0:
                    return dollars
    raise UserError(
        f"AWS has no price for {instance_type} in {file.region}. Set another InstanceType in cluster/cluster.yaml"
    )
