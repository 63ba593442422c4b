"""Find the cluster's network: its VPC, and one subnet per zone."""

from dataclasses import dataclass
from typing import Self

from pydantic import model_validator

import settings
from cluster.common.cluster_file import ClusterFile

ZONES = 3
"""Number of zones that the cluster uses. stack.yaml has a launch template for each."""


class NetworkSection(settings.Section):
    """[cluster.network] of settings.toml."""

    vpc: str = ""
    """Id of the VPC. If empty, the region's default VPC."""
    caller: str = ""
    """Address that may connect to port 22 of the head, as a.b.c.d/32. If empty, this machine's public address."""
    certificate: str = ""
    """ARN of the ACM certificate for serving over HTTPS. If empty, there is no load balancer."""
    clients: str = ""
    """Addresses that may connect to the load balancer, as a.b.c.d/n."""

    @model_validator(mode="after")
    def _clients_are_named(self) -> Self:
        if bool(self.certificate) != bool(self.clients):
            raise ValueError(
                "set both certificate and clients, or neither. Only the addresses in clients can use the load balancer"
            )
        return self


@dataclass(frozen=True)
class Network:
    """A VPC with its subnets."""

    vpc: str
    subnets: list[str]
    """Ids of three subnets, one per zone. With fewer than three zones, ids repeat."""
    zones: list[str]


def find_network(file: ClusterFile, vpc: str) -> Network:
    """Return the VPC, and a subnet in each of up to three zones that offer the last node type's instance type."""
    ec2 = file.client("ec2")
    if not vpc:
        vpcs = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
        if not vpcs:
            raise settings.UserError(
                f"{file.region} has no default VPC. Set vpc in [cluster.network] of settings.toml, "
                "or run: aws ec2 create-default-vpc"
            )
        vpc = vpcs[0]["VpcId"]
    instance_type = file.workers[-1].instance_type
    offered = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [instance_type]}]
    )["InstanceTypeOfferings"]
    zones = {offer["Location"] for offer in offered}
    subnets = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["Subnets"]
    by_zone = {
        subnet["AvailabilityZone"]: subnet["SubnetId"]
        # the zone's subnet with the most free addresses comes last and wins
        for subnet in sorted(subnets, key=lambda subnet: subnet["AvailableIpAddressCount"])
        if subnet["AvailabilityZone"] in zones
    }
    if not by_zone:
        raise settings.UserError(
            f"no zone of {file.region} with a subnet in {vpc} offers {instance_type}. "
            "Set another region or InstanceType in cluster/cluster.yaml"
        )
    used = sorted(by_zone)[:ZONES]
    return Network(vpc=vpc, subnets=[by_zone[used[index % len(used)]] for index in range(ZONES)], zones=used)
