"""Terminate the project's instances on AWS, delete what outlives them, and find what is left."""

import time

import botocore.exceptions

import settings
from cluster.aws import guard, stack
from cluster.common import instances
from cluster.common.cluster_file import TARGET, ClusterFile
from cluster.console import Console

TERMINATE_TIMEOUT_S = 900
TEMPLATES = ("head", "cpu", "gpu-*", "serve-*", "reserved")
"""Ends of the names of the launch templates in stack.yaml."""


def end_instances(file: ClusterFile) -> None:
    """Terminate every instance of the project. Start with the head, whose autoscaler would replace the others.

    Raises:
        settings.UserError: an instance is still not terminated after 15 minutes.
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
                raise settings.UserError(
                    f"instances not terminated after {waited:.0f} s: {names}. Run again: inv down --target {TARGET}"
                )
            spinner.update(f"ending {len(living)} instances: {waited:.0f} s")
            time.sleep(1)


def leftovers(file: ClusterFile) -> list[str]:
    """Return descriptions of everything that the project still has on AWS, except the bucket and the secrets."""
    ec2 = file.client("ec2")
    tagged = [{"Name": "tag:ray-project", "Values": [file.slug]}]
    named = [{"Name": "group-name", "Values": [file.slug]}]
    left = [f"instance {instance.id} ({instance.state})" for instance in instances.living(file)]
    requests = ec2.describe_spot_instance_requests(
        Filters=[{"Name": "launch.key-name", "Values": [file.slug]}, {"Name": "state", "Values": ["open", "active"]}]
    )["SpotInstanceRequests"]
    left += [f"spot request {request['SpotInstanceRequestId']}" for request in requests]
    left += [f"volume {volume['VolumeId']}" for volume in ec2.describe_volumes(Filters=tagged)["Volumes"]]
    interfaces = ec2.describe_network_interfaces(Filters=tagged)["NetworkInterfaces"]
    left += [f"network interface {interface['NetworkInterfaceId']}" for interface in interfaces]
    left += [
        f"security group {group['GroupId']}" for group in ec2.describe_security_groups(Filters=named)["SecurityGroups"]
    ]
    for network in ec2.describe_vpcs(Filters=tagged)["Vpcs"]:
        left.append(f"VPC {network['VpcId']}")
        of_network = [{"Name": "vpc-id", "Values": [network["VpcId"]]}, {"Name": "state", "Values": ["available"]}]
        gateways = ec2.describe_nat_gateways(Filters=of_network)["NatGateways"]
        left += [f"NAT gateway {gateway['NatGatewayId']}" for gateway in gateways]
    addresses = ec2.describe_addresses(Filters=tagged)["Addresses"]
    left += [f"elastic IP address {address['PublicIp']}" for address in addresses]
    keys = ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [file.slug]}])["KeyPairs"]
    left += [f"key pair {key['KeyName']}" for key in keys]
    templates = ec2.describe_launch_templates(
        Filters=[{"Name": "launch-template-name", "Values": [f"{file.slug}-{part}" for part in TEMPLATES]}]
    )["LaunchTemplates"]
    left += [f"launch template {template['LaunchTemplateName']}" for template in templates]
    left += _roles_and_profiles(file)
    if guard.exists(file):
        left.append("the schedule of the guard")
    if found := stack.find(file):
        left.append(f"stack {file.slug} ({found['StackStatus']})")
    return left


def delete_orphans(file: ClusterFile) -> None:
    """Delete volumes and interfaces that outlived their instances, and cancel open spot requests."""
    ec2 = file.client("ec2")
    available = [{"Name": "tag:ray-project", "Values": [file.slug]}, {"Name": "status", "Values": ["available"]}]
    for volume in ec2.describe_volumes(Filters=available)["Volumes"]:
        ec2.delete_volume(VolumeId=volume["VolumeId"])
    for interface in ec2.describe_network_interfaces(Filters=available)["NetworkInterfaces"]:
        ec2.delete_network_interface(NetworkInterfaceId=interface["NetworkInterfaceId"])
    requests = ec2.describe_spot_instance_requests(
        Filters=[{"Name": "launch.key-name", "Values": [file.slug]}, {"Name": "state", "Values": ["open"]}]
    )["SpotInstanceRequests"]
    if requests:
        ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[one["SpotInstanceRequestId"] for one in requests])


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
                if error.response["Error"]["Code"] != "NoSuchEntity":
                    raise
            else:
                left.append(f"{kind} {name}")
    return left
