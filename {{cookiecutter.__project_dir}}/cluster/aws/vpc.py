"""Where the cluster is: its VPC and a subnet in each zone."""

from dataclasses import dataclass
from typing import Self

from pydantic import model_validator

import settings
from cluster.common.cluster_file import ClusterFile

ZONES = 3
"""As many launch templates as stack.yaml has."""


class NetworkSection(settings.Section):
    """[cluster.network] of settings.toml."""

    vpc: str = ""
    """id of the VPC to be in; the region's default VPC when empty"""
    caller: str = ""
    """who may reach the head on port 22, as a.b.c.d/32; the address of this machine when empty"""
    certificate: str = ""
    """ARN of a certificate in ACM: a load balancer then takes HTTPS for the served model; there is none when empty"""
    clients: str = ""
    """who may reach that, as a.b.c.d/n"""

    @model_validator(mode="after")
    def _clients_are_named(self) -> Self:
        if bool(self.certificate) != bool(self.clients):
            raise ValueError("certificate and clients go together: a load balancer, and who may reach it")
        return self


@dataclass(frozen=True)
class Network:
    """Where the cluster is."""

    vpc: str
    subnets: list[str]
    """One a zone, three in all; repeated where fewer zones offer what cluster.yaml asks for."""
    zones: list[str]


def find_network(file: ClusterFile, vpc: str) -> Network:
    """The VPC and, in each zone that offers the largest worker type, one of its subnets."""
    ec2 = file.client("ec2")
    if not vpc:
        vpcs = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
        if not vpcs:
            raise settings.UserError(
                f"{file.region} has no default VPC; name one as vpc in [cluster.network] of settings.toml, "
                "or make one: aws ec2 create-default-vpc"
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
        for subnet in sorted(subnets, key=lambda subnet: subnet["AvailableIpAddressCount"])  # the roomiest of a zone
        if subnet["AvailabilityZone"] in zones
    }
    if not by_zone:
        raise settings.UserError(
            f"no zone of {file.region} with a subnet in {vpc} offers {instance_type}; "
            "take another region or type in cluster/cluster.yaml."
        )
    used = sorted(by_zone)[:ZONES]
    return Network(vpc=vpc, subnets=[by_zone[used[index % len(used)]] for index in range(ZONES)], zones=used)
