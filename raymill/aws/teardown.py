"""Terminate the project's instances on AWS, delete what outlives them, and find what is left."""

import time
from collections.abc import Callable
from typing import Any

import botocore.exceptions

from raymill.aws import aws_errors, guard, secrets_manager, stack
from raymill.aws.deletion import attempt, attempt_each
from raymill.common import instances
from raymill.common.cluster_file import ClusterFile, target
from raymill.console import Console
from raymill.errors import UserError

TERMINATE_TIMEOUT_S = 900
SETTLE_TIMEOUT_S = 30.0
SETTLE_S = 3.0
TEMPLATES = ("head", "cpu", "gpu-*", "serve-*", "reserved")
"""Ends of the names of the launch templates in stack.yaml."""


def end_instances(file: ClusterFile) -> None:
    """Terminate every instance of the project. Start with the head, whose autoscaler would replace the others.

    Raises:
        UserError: an instance is still not terminated after 15 minutes.
    """
    started = time.monotonic()
    with Console().status("ending instances") as spinner:
        while living := instances.living(file):
            if to_end := [instance.id for instance in living if instance.state != "shutting-down"]:
                heads = [instance.id for instance in living if instance.node_type == file.head.name]
                instances.terminate(file, [*heads, *(one for one in to_end if one not in heads)])
            waited = time.monotonic() - started
            if waited > TERMINATE_TIMEOUT_S:
                names = ", ".join(instance.id for instance in living)
                raise UserError(
                    f"instances not terminated after {waited:.0f} s: {names}. Run again: inv down --target {target()}"
                )
            spinner.update(f"ending {len(living)} instances: {waited:.0f} s")
            time.sleep(1)


def delete_orphans(file: ClusterFile) -> list[str]:
    """Delete volumes and interfaces that outlived their instances, and cancel open spot requests.

    Return what could not be deleted and why.
    """
    ec2 = file.client("ec2")
    available = [*_tagged(file), {"Name": "status", "Values": ["available"]}]
    return [
        *attempt_each(
            "volume",
            lambda: [one["VolumeId"] for one in ec2.describe_volumes(Filters=available)["Volumes"]],
            lambda one: ec2.delete_volume(VolumeId=one),
        ),
        *attempt_each(
            "network interface",
            lambda: [
                one["NetworkInterfaceId"]
                for one in ec2.describe_network_interfaces(Filters=available)["NetworkInterfaces"]
            ],
            lambda one: ec2.delete_network_interface(NetworkInterfaceId=one),
        ),
        *attempt_each(
            "spot request",
            lambda: _spot_requests(file, "open"),
            lambda one: ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[one]),
        ),
    ]


def leftovers(file: ClusterFile) -> list[str]:
    """Return descriptions of everything that the project still has on AWS, except the bucket.

    If AWS does not answer one of the questions, this says so, and asks the others.
    """
    left: list[str] = []
    for kind, find in LEFTOVERS.items():
        found: list[str] = []
        unknown = attempt(f"perhaps {kind}", lambda found=found, find=find: found.extend(find(file)))
        left += [*found, *unknown]
    return left


def settled_leftovers(file: ClusterFile) -> list[str]:
    """Return the leftovers when AWS has finished: it lists what it has just deleted for some more seconds."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while (left := leftovers(file)) and time.monotonic() < deadline:
        time.sleep(SETTLE_S)
    return left


def _tagged(file: ClusterFile) -> list[dict[str, Any]]:
    return [{"Name": "tag:ray-project", "Values": [file.slug]}]


def _spot_requests(file: ClusterFile, *states: str) -> list[str]:
    filters = [{"Name": "launch.key-name", "Values": [file.slug]}, {"Name": "state", "Values": list(states)}]
    found = file.client("ec2").describe_spot_instance_requests(Filters=filters)["SpotInstanceRequests"]
    return [request["SpotInstanceRequestId"] for request in found]


def _instances(file: ClusterFile) -> list[str]:
    return [f"instance {one.id} ({one.state})" for one in instances.living(file)]


def _open_requests(file: ClusterFile) -> list[str]:
    return [f"spot request {one}" for one in _spot_requests(file, "open", "active")]


def _volumes(file: ClusterFile) -> list[str]:
    volumes = file.client("ec2").describe_volumes(Filters=_tagged(file))["Volumes"]
    return [f"volume {volume['VolumeId']}" for volume in volumes]


def _interfaces(file: ClusterFile) -> list[str]:
    interfaces = file.client("ec2").describe_network_interfaces(Filters=_tagged(file))["NetworkInterfaces"]
    return [f"network interface {interface['NetworkInterfaceId']}" for interface in interfaces]


def _groups(file: ClusterFile) -> list[str]:
    named = [{"Name": "group-name", "Values": [file.slug]}]
    groups = file.client("ec2").describe_security_groups(Filters=named)["SecurityGroups"]
    return [f"security group {group['GroupId']}" for group in groups]


def _networks(file: ClusterFile) -> list[str]:
    ec2, left = file.client("ec2"), []
    for network in ec2.describe_vpcs(Filters=_tagged(file))["Vpcs"]:
        left.append(f"VPC {network['VpcId']}")
        of_network = [{"Name": "vpc-id", "Values": [network["VpcId"]]}, {"Name": "state", "Values": ["available"]}]
        gateways = ec2.describe_nat_gateways(Filters=of_network)["NatGateways"]
        left += [f"NAT gateway {gateway['NatGatewayId']}" for gateway in gateways]
    return left


def _addresses(file: ClusterFile) -> list[str]:
    addresses = file.client("ec2").describe_addresses(Filters=_tagged(file))["Addresses"]
    return [f"elastic IP address {address['PublicIp']}" for address in addresses]


def _keys(file: ClusterFile) -> list[str]:
    named = [{"Name": "key-name", "Values": [file.slug]}]
    keys = file.client("ec2").describe_key_pairs(Filters=named)["KeyPairs"]
    return [f"key pair {key['KeyName']}" for key in keys]


def _templates(file: ClusterFile) -> list[str]:
    named = [{"Name": "launch-template-name", "Values": [f"{file.slug}-{part}" for part in TEMPLATES]}]
    templates = file.client("ec2").describe_launch_templates(Filters=named)["LaunchTemplates"]
    return [f"launch template {template['LaunchTemplateName']}" for template in templates]


def _roles_and_profiles(file: ClusterFile) -> list[str]:
    iam = file.client("iam")
    left = []
    for part in ("head", "worker", "guard", "guard-caller"):
        name = file.role(part)
        for kind, ask in (
            ("role", lambda name=name: iam.get_role(RoleName=name)),
            ("instance profile", lambda name=name: iam.get_instance_profile(InstanceProfileName=name)),
        ):
            try:
                ask()
            except botocore.exceptions.ClientError as error:
                if not aws_errors.is_missing(error):
                    raise
            else:
                left.append(f"{kind} {name}")
    return left


def _schedule(file: ClusterFile) -> list[str]:
    return ["the schedule of the guard"] if guard.exists(file) else []


def _secrets(file: ClusterFile) -> list[str]:
    return [f"secret {name}" for name in secrets_manager.names(file)]


def _stack(file: ClusterFile) -> list[str]:
    found = stack.find(file)
    return [f"stack {file.slug} ({found['StackStatus']})"] if found else []


LEFTOVERS: dict[str, Callable[[ClusterFile], list[str]]] = {
    "instances": _instances,
    "spot requests": _open_requests,
    "volumes": _volumes,
    "network interfaces": _interfaces,
    "security groups": _groups,
    "a VPC": _networks,
    "elastic IP addresses": _addresses,
    "key pairs": _keys,
    "launch templates": _templates,
    "roles": _roles_and_profiles,
    "the schedule of the guard": _schedule,
    "secrets": _secrets,
    "a stack": _stack,
}
"""What `down` may leave behind, and the functions that find it."""
