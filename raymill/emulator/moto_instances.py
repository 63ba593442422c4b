"""A view of moto's EC2 instances for the other parts of the emulator, and the image that they start from."""

import datetime
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.models.amis import Ami
from moto.ec2.models.subnets import Subnet
from moto.ssm.models import Parameter, ssm_backends

# moto's own 1,300 images take 0.2 s per account and region, and would let launches start from images that are not here
os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"

ACCOUNT = "123456789012"  # moto's default account
OTHER_ACCOUNT = "210987654321"
IMAGE = "ami-12c6146b"  # a stand-in for NVIDIA's; hosts boot from host_image.py's image
# the SSM parameter with the image's id; moto lacks this parameter
IMAGE_PARAMETER = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"


@dataclass(frozen=True)
class MotoInstance:
    """A snapshot of one instance's state."""

    moto: Any
    """moto's own object."""
    id: str
    type: str
    market: str
    """"spot", "on-demand" or "capacity-block"."""
    state: str
    zone: str
    region: str
    account: str
    private_ip: str
    public_ip: str
    role: str | None
    """Name of the IAM role in its instance profile."""
    public_key: str
    user_data: bytes
    tags: dict[str, str]


def list_all() -> Iterator[MotoInstance]:
    """Yield every instance in every account and region, including terminated instances."""
    backends = [(account, *one) for account, regions in list(ec2_backends.items()) for one in list(regions.items())]
    for account, region, backend in backends:
        profiles = {
            association.instance.id: association.iam_instance_profile
            for association in list(backend.iam_instance_profile_associations.values())
        }
        for reservation in list(backend.reservations.values()):
            for instance in list(reservation.instances):
                profile = profiles.get(instance.id)
                key = backend.key_pairs.get(instance.key_name or "")
                yield MotoInstance(
                    moto=instance,
                    id=instance.id,
                    type=instance.instance_type,
                    market=instance.lifecycle or "on-demand",
                    state=instance.state,
                    zone=instance.placement.zone or "",
                    region=region,
                    account=account,
                    private_ip=instance.private_ip or "",
                    public_ip=instance.public_ip or "",
                    role=profile.roles[0].name if profile and profile.roles else None,
                    public_key=key.material_public.decode() + "\n" if key else "",
                    user_data=instance.user_data.decode().encode() if instance.user_data else b"",
                    # not get_tags(), which goes through all tags in this region while requests change them
                    tags=dict(backend.tags.get(instance.id, {})),
                )


def find_running(address: str) -> MotoInstance | None:
    """Return the running instance with this private or public address, or None."""
    return next(
        (one for one in list_all() if one.state == "running" and address in (one.private_ip, one.public_ip)),
        None,
    )


def install_unique_addresses() -> None:
    """Let moto, in this process, give no instance a private address that another one has.

    On AWS, instances in two VPCs can have the same one. Here, they are all on one bridge.
    """
    next_address = Subnet.get_available_subnet_ip

    def unique(self: Any, instance: Any) -> str:
        taken = {one.private_ip for one in list_all() if one.state != "terminated"}
        address = next_address(self, instance)
        while address in taken:  # stays taken in this subnet, too
            address = next_address(self, instance)
        return address

    Subnet.get_available_subnet_ip = unique


def complete(account: str, region: str, launch: Mapping[str, str]) -> list[str]:
    """Give all instances of a launch what moto forgets: the instance profile, which only the first has, and the group.

    `launch` has the parameters of RunInstances. Returns the ids of the new instances.
    """
    backend = ec2_backends[account][region]
    with_profile = backend.iam_instance_profile_associations
    for reservation in list(backend.reservations.values()):
        for instance in reservation.instances:
            if reservation.instances[0].id in with_profile and instance.id not in with_profile:
                backend.associate_iam_instance_profile(
                    instance.id, iam_instance_profile_name=launch["IamInstanceProfile.Name"]
                )
    newest = list(backend.reservations.values())[-1]
    for instance in newest.instances:
        instance.placement.group_name = launch.get("Placement.GroupName", "")
    return [instance.id for instance in newest.instances]


def internet_gateway(instance: MotoInstance) -> str:
    """Return the id of the gateway through which an instance reaches the internet, or "" if it cannot.

    An internet gateway carries only the traffic of instances with a public address.
    """
    backend = ec2_backends[instance.account][instance.region]
    tables = backend.describe_route_tables(filters={"association.subnet-id": [instance.moto.subnet_id]})
    if not tables:
        vpc = backend.get_subnet(instance.moto.subnet_id).vpc_id
        tables = backend.describe_route_tables(filters={"association.main": ["true"], "vpc-id": [vpc]})
    for route in (route for table in tables for route in table.routes):
        if route.destination_cidr_block == "0.0.0.0/0":
            if route.nat_gateway:
                return route.nat_gateway.id
            return route.gateway.id if route.gateway and instance.public_ip else ""
    return ""


def publish_image(region: str, image: str, account: str = ACCOUNT) -> None:
    """Add the image to the region, and make it the latest one, to which cluster.yaml refers."""
    ec2: Any = ec2_backends[account][region]
    ec2.amis[image] = Ami(
        ec2, image, name="emulated", owner_alias="amazon", public=True, virtualization_type="hvm", architecture="x86_64"
    )
    parameter = Parameter(
        account_id=account,
        name=IMAGE_PARAMETER,
        value=image,
        parameter_type="String",
        description=None,
        allowed_pattern=None,
        keyid=None,
        last_modified_date=datetime.datetime.now(datetime.UTC),
        version=1,
        data_type="aws:ec2:image",
    )
    # moto's public methods reject names that start with /aws, as AWS does
    parameters: Any = ssm_backends[account][region]._parameters
    parameters[IMAGE_PARAMETER].append(parameter)
