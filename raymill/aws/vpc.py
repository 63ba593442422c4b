"""The cluster's network: the zones, the user's subnets if settings.toml names some, and the network cards for EFA."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raymill.aws import stack, zones
from raymill.aws.zones import ZONES, Offers
from raymill.common.cluster_file import ClusterFile, NodeType, target
from raymill.errors import UserError
from raymill.ray_support.aws_sections import NetworkSection


@dataclass(frozen=True)
class Network:
    """Where the cluster's instances start."""

    zones: list[str]
    """Names of three zones. With fewer, names repeat."""
    vpc: str = ""
    """Id of the VPC of the user's subnets. If empty, the stack makes a VPC."""
    head_subnet: str = ""
    """The user's subnet for the head."""
    head_zone: str = ""
    """The zone of this subnet. If empty, the head is in the first zone."""
    subnets: tuple[str, ...] = ("", "", "")
    """The user's subnet in each zone. If empty, the stack makes subnets."""

    @property
    def stack_parameters(self) -> dict[str, str]:
        return {
            "Vpc": self.vpc,
            "HeadSubnet": self.head_subnet,
            **{f"Zone{number}": zone for number, zone in enumerate(self.zones, 1)},
            **{f"Subnet{number}": subnet for number, subnet in enumerate(self.subnets, 1)},
        }


def find_network(file: ClusterFile, section: NetworkSection, offers: Offers | None = None) -> Network:
    """Return the network of the running stack, or choose one for a new stack. `offers` is what `zones.offered` returns.

    Raises:
        UserError: no zone or subnet is suitable, or the stack is in another VPC.
    """
    offers = offers or zones.offered(file)
    network = _choose_network(file, section, offers)
    stays_in = stack.parameters(file).get("Vpc", network.vpc)
    if network.vpc != stays_in:
        # the security group has a fixed name and the instances, so CloudFormation cannot replace it
        raise UserError(
            f"the stack {file.slug} is in {stays_in or 'a VPC of its own'}, and subnets in [cluster.network] of "
            f"settings.toml now mean {network.vpc or 'a VPC of its own'}. To move it, run: inv down "
            f"--target {target()}   then: inv up --target {target()}"
        )
    return network


def _choose_network(file: ClusterFile, section: NetworkSection, offers: Offers) -> Network:
    if section.subnets:
        return _network_of_subnets(file, section, offers)
    with_gpus = zones.of_gpus(file, offers)
    kept = _zones_of_stack(file)
    if kept and not with_gpus & set(kept):
        raise UserError(
            f"no zone of the stack {file.slug} offers {zones.gpu_type(file)}. For a stack in "
            f"{', '.join(sorted(with_gpus))}, run: inv down --target {target()}   then: inv up --target {target()}"
        )
    return Network(kept or _three(zones.choose(file, offers)))


def refuse_first_zone(file: ClusterFile, section: NetworkSection, network: Network, offers: Offers) -> None:
    """Raise `UserError` if the head or the CPU workers cannot start, because their zone lacks their type."""
    for node_type, problem in unoffered(file, section, network, offers):
        if not zones.has_own_zone(node_type):
            raise UserError(problem)


def unoffered(
    file: ClusterFile, section: NetworkSection, network: Network, offers: Offers
) -> Iterator[tuple[NodeType, str]]:
    """Yield what no zone offers in which the cluster would start it: a node type, and a sentence with the remedy.

    An instance type with GPUs may be offered in only some of the cluster's zones.
    """
    starts: dict[str, tuple[NodeType, set[str]]] = {}
    for one in (file.head, *file.workers):
        if zone := _zone_of(file, network, one):
            key = one.instance_type if zones.has_own_zone(one) else one.name
            starts.setdefault(key, (one, set()))[1].add(zone)
    for node_type, used in starts.values():
        name, offering = node_type.instance_type, offers[node_type.instance_type]
        if not used & offering:
            which = f"{name} (head)" if node_type == file.head else name
            where = (
                f"only {', '.join(sorted(offering))} offer it" if offering else f"no zone of {file.region} offers it"
            )
            text = f"{which} would start in {', '.join(sorted(used))}, but {where}"
            yield node_type, f"{text}. {_remedy(file, section, offering)}"


def _zone_of(file: ClusterFile, network: Network, node_type: NodeType) -> str:
    """Return the zone in which a node type starts, or "" for reserved instances, whose zone AWS has chosen."""
    if node_type == file.head and network.head_zone:
        return network.head_zone
    if not zones.has_own_zone(node_type):
        return network.zones[0]
    number = node_type.zone or node_type.serve_zone
    is_reserved = "CapacityReservationSpecification" in node_type.node_config
    return network.zones[int(number) - 1] if number.isdigit() and not is_reserved else ""


def _remedy(file: ClusterFile, section: NetworkSection, offering: set[str]) -> str:
    if offering and section.subnets:
        return "In [cluster.network] of settings.toml, name a subnet in such a zone"
    if offering and _zones_of_stack(file):
        return f"For a stack in other zones, run: inv down --target {target()}   then: inv up --target {target()}"
    return "Set another type in cluster/cluster.yaml, or in [cluster.gpu] of settings.toml"


def efa_cards(file: ClusterFile, section: NetworkSection) -> int:
    """Return how many network cards of a GPU instance use EFA.

    This is 0 if a type has no EFA, or if there is only one worker. Instances with a public address use one card,
    because EC2 gives no public address to an instance with several network interfaces.
    """
    if not section.efa or file.max_workers == 1:
        return 0
    types = sorted({worker.instance_type for worker in file.workers if worker.zone})
    described = file.client("ec2").describe_instance_types(InstanceTypes=types)["InstanceTypes"]
    cards = min(one["NetworkInfo"].get("EfaInfo", {}).get("MaximumEfaInterfaces", 0) for one in described)
    return cards if section.private else min(cards, 1)


def default_route(file: ClusterFile, subnet: dict[str, Any]) -> str:
    """Return the id of the gateway to which a subnet sends internet traffic, such as igw-… or nat-…, or "" if none.

    A subnet without a route table of its own uses the main route table of its VPC.
    """
    ec2 = file.client("ec2")
    own = [{"Name": "association.subnet-id", "Values": [subnet["SubnetId"]]}]
    main = [{"Name": "association.main", "Values": ["true"]}, {"Name": "vpc-id", "Values": [subnet["VpcId"]]}]
    found = (ec2.describe_route_tables(Filters=filters)["RouteTables"] for filters in (own, main))
    routes = [route for table in next(filter(None, found), []) for route in table["Routes"]]
    internet = [route for route in routes if route.get("DestinationCidrBlock") == "0.0.0.0/0"]
    keys = ("GatewayId", "NatGatewayId", "TransitGatewayId", "NetworkInterfaceId")
    return next((route[key] for route in internet for key in keys if route.get(key)), "")


def _network_of_subnets(file: ClusterFile, section: NetworkSection, offers: Offers) -> Network:
    """Return the user's subnets in zones that offer the GPU instances, in the user's order.

    The first one is for CPU workers and, without `head_subnet`, for the head, so it is the first whose zone offers
    their types. If possible, this zone also offers the GPU instances.
    """
    ids = section.subnets
    all_ids = sorted({*ids, section.head_subnet} - {""})
    described = file.client("ec2").describe_subnets(SubnetIds=all_ids)["Subnets"]
    if len({subnet["VpcId"] for subnet in described}) > 1:
        raise UserError(
            f"the subnets {', '.join(all_ids)} are in several VPCs. In [cluster.network] of settings.toml, name "
            "subnets of one VPC"
        )
    zone_of = {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in described}
    with_gpus = offers[zones.gpu_type(file)]
    usable = [subnet for subnet in ids if zone_of[subnet] in with_gpus]
    if not usable:
        raise UserError(
            f"none of the subnets {', '.join(ids)} is in a zone that offers {zones.gpu_type(file)} "
            f"({', '.join(sorted(with_gpus)) or 'none in this region'}). Change subnets in [cluster.network] of "
            "settings.toml, or set subnets = [], so that the stack makes a VPC"
        )
    possible = zones.for_first(file, offers, with_head=not section.head_subnet)
    first = next((subnet for subnet in [*usable, *ids] if zone_of[subnet] in possible), usable[0])
    used = _three([first, *(subnet for subnet in usable if subnet != first)])
    head_subnet = section.head_subnet or first
    return Network(
        zones=[zone_of[subnet] for subnet in used],
        vpc=described[0]["VpcId"],
        head_subnet=head_subnet,
        head_zone=zone_of[head_subnet],
        subnets=tuple(used),
    )


def _zones_of_stack(file: ClusterFile) -> list[str]:
    """Return the zones of the existing stack, or [] if there is no stack.

    They never change, because CloudFormation would have to replace subnets in which instances run.
    """
    known = stack.parameters(file)
    return [known[f"Zone{number}"] for number in range(1, ZONES + 1) if f"Zone{number}" in known]


def _three(found: list[str]) -> list[str]:
    used = found[:ZONES]
    return [used[index % len(used)] for index in range(ZONES)]
