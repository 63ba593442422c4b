"""Which zones offer the cluster's instance types, and the choice of zones for a new stack."""

import re

from raymill.common import prices
from raymill.common.cluster_file import ClusterFile, NodeType
from raymill.errors import UserError

ZONES = 3
"""Number of zones that the cluster uses. stack.yaml has a subnet and a launch template for each."""
Offers = dict[str, set[str]]
"""Names of the zones that offer an instance type, by type."""


def offered(file: ClusterFile) -> Offers:
    """Return the zones of the region that offer each instance type of the cluster.

    EC2 also lists Local Zones and Wavelength Zones, in which the stack's network would not work. Their names have more
    than a letter after the name of the region.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-regions-availability-zones.html
    """
    found: Offers = {one.instance_type: set() for one in (file.head, *file.workers)}
    offers = file.client("ec2").describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": sorted(found)}]
    )["InstanceTypeOfferings"]
    for offer in offers:
        if re.fullmatch(f"{file.region}[a-z]", offer["Location"]):
            found[offer["InstanceType"]].add(offer["Location"])
    return found


def of_gpus(file: ClusterFile, offers: Offers) -> set[str]:
    """Return the zones that offer the preferred GPU type. Raises `UserError` if there is none."""
    if zones := offers[gpu_type(file)]:
        return zones
    raise UserError(
        f"no zone of {file.region} offers {gpu_type(file)}. Set another region or InstanceType in cluster/cluster.yaml"
    )


def for_first(file: ClusterFile, offers: Offers, *, with_head: bool = True) -> set[str]:
    """Return the zones that offer all types without a zone of their own: the head's and those of CPU workers."""
    shared = [one.instance_type for one in file.workers if not has_own_zone(one)]
    types = [*shared, *([file.head.instance_type] if with_head else [])]
    return set.intersection(*(offers[name] for name in types)) if types else offers[gpu_type(file)]


def choose(file: ClusterFile, offers: Offers) -> list[str]:
    """Return the zones for a new stack. The head and the CPU workers start in the first one.

    All but the first offer the preferred GPU type, and so does the first one, if any zone offers that type and those
    of the head and the CPU workers. Zones that offer more of the GPU types come first, and among these the cheaper
    ones, because a low spot price shows that AWS has free capacity.
    """
    zones = of_gpus(file, offers)
    types = {one.instance_type for one in file.workers if has_own_zone(one)}
    dollars = prices.to_order_zones(file, [gpu_type(file)]).get(gpu_type(file), {})

    def order(zone: str) -> tuple[int, float, str]:
        return -sum(zone in offers[name] for name in types), dollars.get(zone, float("inf")), zone

    ordered = sorted(zones, key=order)
    possible = for_first(file, offers)
    first = next((zone for zone in [*ordered, *sorted(possible)] if zone in possible), ordered[0])
    return [first, *(zone for zone in ordered if zone != first)]


def has_own_zone(node_type: NodeType) -> bool:
    """Return whether the node type is for one zone only, as those with GPUs are."""
    return bool(node_type.zone or node_type.serve_zone)


def gpu_type(file: ClusterFile) -> str:
    """Return the preferred GPU type for training, which the last node type has."""
    return file.workers[-1].instance_type
