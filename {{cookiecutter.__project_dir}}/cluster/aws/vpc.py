"""The cluster's network: the zones, the user's subnets if settings.toml names some, and the network cards for EFA."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Self

from pydantic import model_validator

import settings
from cluster.aws import stack
from cluster.common import prices
from cluster.common.cluster_file import TARGET, ClusterFile

PUBLIC_KEY = re.compile(r"[a-z][\w.@-]+ [A-Za-z0-9+/=]{40,}( [^\n]*)?")
"""The line in a file such as ~/.ssh/id_ed25519.pub: type, key and an optional comment."""
ZONES = 3
"""Number of zones that the cluster uses. stack.yaml has a subnet and a launch template for each."""


class NetworkSection(settings.Section):
    """[cluster.network] of settings.toml."""

    subnets: tuple[str, ...] = ()
    """Ids of your subnets, one per zone. If empty, the stack makes a VPC with its own subnets."""
    head_subnet: str = ""
    """Id of your public subnet for the head. If empty, the first of `subnets`."""
    private: bool = False
    """Whether workers have no public addresses. The stack's own VPC then has a NAT gateway."""
    efa: bool = True
    """Whether GPU workers use EFA and a placement group per zone, if their instance type supports EFA."""
    callers: tuple[str, ...] = ()
    """Addresses that may connect to port 22 of the head, as a.b.c.d/32. If empty, this machine's public address."""
    ssh_keys: tuple[str, ...] = ()
    """Public keys of other people, who connect to the head with their own private keys."""
    certificate: str = ""
    """ARN of the ACM certificate for serving over HTTPS. If empty, there is no load balancer."""
    clients: str = ""
    """Addresses that may connect to the load balancer, as a.b.c.d/n."""

    @model_validator(mode="after")
    def _head_has_a_subnet(self) -> Self:
        if self.head_subnet and not self.subnets:
            raise ValueError("set subnets too: head_subnet must be in the VPC of your other subnets")
        if self.private and self.subnets and not self.head_subnet:
            raise ValueError("set head_subnet to a public subnet, because subnets are private")
        return self

    @model_validator(mode="after")
    def _clients_are_named(self) -> Self:
        if bool(self.certificate) != bool(self.clients):
            raise ValueError(
                "set both certificate and clients, or neither. Only the addresses in clients can use the load balancer"
            )
        return self

    @model_validator(mode="after")
    def _callers_are_addresses(self) -> Self:
        for caller in self.callers:
            try:
                is_open = ipaddress.IPv4Network(caller).prefixlen == 0
            except ValueError:
                raise ValueError(f"{caller!r} in callers is not an address. Write it as a.b.c.d/32") from None
            if is_open:
                raise ValueError(f"{caller!r} in callers would open port 22 to the world. Name single addresses")
        return self

    @model_validator(mode="after")
    def _keys_are_public(self) -> Self:
        for key in self.ssh_keys:
            if not PUBLIC_KEY.fullmatch(key):
                raise ValueError(
                    f"{key[:20]!r} in ssh_keys is not a public key. Copy the line in ~/.ssh/id_ed25519.pub, for example"
                )
        return self

    @property
    def costs(self) -> str:
        """What the network costs, or "" if it is free."""
        if not self.private or self.subnets:
            return ""
        return (
            "the NAT gateway for private workers costs about 0.05 dollars per hour, and as much per GB, until inv down"
        )


@dataclass(frozen=True)
class Network:
    """Where the cluster's instances start."""

    zones: list[str]
    """Names of three zones. With fewer, names repeat."""
    vpc: str = ""
    """Id of the VPC of the user's subnets. If empty, the stack makes a VPC."""
    head_subnet: str = ""
    """The user's subnet for the head."""
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


def find_network(file: ClusterFile, section: NetworkSection) -> Network:
    """Return the network of the running stack, or choose one for a new stack.

    Raises:
        settings.UserError: no zone or subnet is suitable, or the stack is in another VPC.
    """
    network = _choose_network(file, section)
    stays_in = stack.parameters(file).get("Vpc", network.vpc)
    if network.vpc != stays_in:
        # the security group has a fixed name and the instances, so CloudFormation cannot replace it
        raise settings.UserError(
            f"the stack {file.slug} is in {stays_in or 'a VPC of its own'}, and subnets in [cluster.network] of "
            f"settings.toml now mean {network.vpc or 'a VPC of its own'}. To move it, run: inv down --target {TARGET} "
            f"  then: inv up --target {TARGET}"
        )
    return network


def _choose_network(file: ClusterFile, section: NetworkSection) -> Network:
    offered = offered_zones(file)
    if section.subnets:
        return _network_of_subnets(file, section, offered)
    if not offered:
        raise settings.UserError(
            f"no zone of {file.region} offers {_gpu_type(file)}. Set another region or InstanceType in "
            "cluster/cluster.yaml"
        )
    kept = _zones_of_stack(file)
    if kept and not offered & set(kept):
        raise settings.UserError(
            f"no zone of the stack {file.slug} offers {_gpu_type(file)}. For a stack in {', '.join(sorted(offered))}, "
            f"run: inv down --target {TARGET}   then: inv up --target {TARGET}"
        )
    return Network(kept or _three(_cheapest_first(file, offered)))


def _cheapest_first(file: ClusterFile, zones: set[str]) -> list[str]:
    """Sort zones by the spot price of the GPU instances, because a low price shows that AWS has free capacity."""
    dollars = prices.spot_prices(file, [_gpu_type(file)]).get(_gpu_type(file), {})
    return sorted(zones, key=lambda zone: (dollars.get(zone, float("inf")), zone))


def offered_zones(file: ClusterFile) -> set[str]:
    """Return the names of the region's zones that offer the cluster's GPU instances."""
    offers = file.client("ec2").describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [_gpu_type(file)]}]
    )["InstanceTypeOfferings"]
    return {offer["Location"] for offer in offers}


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


def _gpu_type(file: ClusterFile) -> str:
    return file.workers[-1].instance_type


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


def _network_of_subnets(file: ClusterFile, section: NetworkSection, offered: set[str]) -> Network:
    """Return the user's subnets in zones that offer the GPU instances, in the user's order."""
    ids = section.subnets
    all_ids = sorted({*ids, section.head_subnet} - {""})
    described = file.client("ec2").describe_subnets(SubnetIds=all_ids)["Subnets"]
    if len({subnet["VpcId"] for subnet in described}) > 1:
        raise settings.UserError(
            f"the subnets {', '.join(all_ids)} are in several VPCs. In [cluster.network] of settings.toml, name "
            "subnets of one VPC"
        )
    zones = {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in described}
    usable = [subnet for subnet in ids if zones[subnet] in offered]
    if not usable:
        raise settings.UserError(
            f"none of the subnets {', '.join(ids)} is in a zone that offers {_gpu_type(file)} "
            f"({', '.join(sorted(offered)) or 'none in this region'}). Change subnets in [cluster.network] of "
            "settings.toml, or set subnets = [], so that the stack makes a VPC"
        )
    return Network(
        zones=_three([zones[subnet] for subnet in usable]),
        vpc=described[0]["VpcId"],
        head_subnet=section.head_subnet or usable[0],
        subnets=tuple(_three(usable)),
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
