"""The cluster's instances as EC2 knows them, and what else AWS still holds of the project."""

import datetime
import time
from dataclasses import dataclass
from typing import Any

import botocore.exceptions
from rich.console import Console

import settings
from cluster.aws import stack
from cluster.aws.ssh import Head
from cluster.common.cluster_file import TARGET, ClusterFile

LIVING = ["pending", "running", "stopping", "stopped", "shutting-down"]
TERMINATE_TIMEOUT_S = 900
FILES_TAG = "project-files"
"""On the head: the digest of the files that it was last set up from."""
LAST_WORDS = "cluster/last-words.txt"
"""In the project's bucket: why the cluster ended itself."""


@dataclass(frozen=True)
class Machine:
    """One instance."""

    id: str
    node_type: str
    instance_type: str
    market: str
    zone: str
    state: str
    public_address: str
    private_address: str
    launched: datetime.datetime
    tags: dict[str, str]

    @property
    def age_s(self) -> float:
        return (datetime.datetime.now(datetime.UTC) - self.launched).total_seconds()


def living(file: ClusterFile) -> list[Machine]:
    """All instances with the project's tag that have not ended, the head first."""
    filters = [
        {"Name": "tag:ray-project", "Values": [file.slug]},
        {"Name": "instance-state-name", "Values": LIVING},
    ]
    pages = file.client("ec2").get_paginator("describe_instances").paginate(Filters=filters)
    found = [
        _machine(instance)
        for page in pages
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
    ]
    return sorted(found, key=lambda machine: (machine.node_type != file.head.name, machine.launched))


def head(file: ClusterFile) -> Machine | None:
    """The head, when one runs."""
    heads = [one for one in living(file) if one.node_type == file.head.name and one.state == "running"]
    return heads[0] if heads else None


def reach(file: ClusterFile) -> Head:
    """The way to the head. Raises `settings.UserError` when no head runs."""
    machine = head(file)
    if machine is None:
        raise settings.UserError(
            f"no cluster {file.slug} runs in {file.region}{_last_words(file)}; start it with: inv up --target {TARGET}"
        )
    if not file.key_file.exists():
        raise settings.UserError(
            f"the cluster's private key {file.key_file} is not on this machine; copy it from where `inv up` ran."
        )
    address = machine.public_address or machine.private_address
    return Head(
        instance_id=machine.id,
        address=machine.id if file.auth.get("ssh_proxy_use_node_id") else address,
        user=file.auth["ssh_user"],
        key_file=file.key_file,
        proxy_command=file.auth.get("ssh_proxy_command", ""),
    )


def end_all(file: ClusterFile) -> None:
    """Terminate every instance of the project, the head first: its autoscaler would replace the others.

    Raises:
        settings.UserError: some have not ended after a quarter of an hour.
    """
    ec2 = file.client("ec2")
    started = time.monotonic()
    with Console().status("ending instances") as spinner:
        while machines := living(file):
            if to_end := [machine.id for machine in machines if machine.state != "shutting-down"]:
                heads = [machine.id for machine in machines if machine.node_type == file.head.name]
                ec2.terminate_instances(InstanceIds=[*heads, *(one for one in to_end if one not in heads)])
            waited = time.monotonic() - started
            if waited > TERMINATE_TIMEOUT_S:
                names = ", ".join(machine.id for machine in machines)
                raise settings.UserError(
                    f"{names} have not ended after {waited:.0f} s; try again: inv down --target {TARGET}"
                )
            spinner.update(f"ending {len(machines)} instances: {waited:.0f} s")
            time.sleep(1)


def leftovers(file: ClusterFile) -> list[str]:
    """Everything but the bucket that AWS still holds of the project, in words."""
    ec2 = file.client("ec2")
    tagged = [{"Name": "tag:ray-project", "Values": [file.slug]}]
    named = [{"Name": "group-name", "Values": [file.slug]}]
    left = [f"instance {machine.id} ({machine.state})" for machine in living(file)]
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
    keys = ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [file.slug]}])["KeyPairs"]
    left += [f"key pair {key['KeyName']}" for key in keys]
    templates = ec2.describe_launch_templates(
        Filters=[{"Name": "launch-template-name", "Values": [f"{file.slug}-zone-*"]}]
    )["LaunchTemplates"]
    left += [f"launch template {template['LaunchTemplateName']}" for template in templates]
    left += _roles_and_profiles(file)
    if found := stack.find(file):
        left.append(f"stack {file.slug} ({found['StackStatus']})")
    return left


def delete_loose(file: ClusterFile) -> None:
    """Delete volumes and interfaces that outlived their instances, and cancel spot requests."""
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


def say_last_words(file: ClusterFile, reason: str) -> None:
    """Leave the reason why a cluster ended itself where `inv status` finds it: its logs end with its machines."""
    words = f"it ended itself at {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC: {reason}"
    file.client("s3").put_object(Bucket=stack.bucket(file), Key=LAST_WORDS, Body=words.encode())


def _last_words(file: ClusterFile) -> str:
    try:
        answer = file.client("s3").get_object(Bucket=stack.bucket(file), Key=LAST_WORDS)
    except botocore.exceptions.ClientError:  # none were said
        return ""
    return f" ({answer['Body'].read().decode()})"


def forget_last_words(file: ClusterFile) -> None:
    """For a cluster that begins."""
    file.client("s3").delete_object(Bucket=stack.bucket(file), Key=LAST_WORDS)


def _roles_and_profiles(file: ClusterFile) -> list[str]:
    iam = file.client("iam")
    left = []
    for part in ("head", "worker"):
        name = f"{file.slug}-{part}"
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


def _machine(instance: dict[str, Any]) -> Machine:
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
    return Machine(
        id=instance["InstanceId"],
        node_type=tags.get("ray-user-node-type", ""),
        instance_type=instance["InstanceType"],
        market=instance.get("InstanceLifecycle") or "on-demand",
        zone=instance["Placement"]["AvailabilityZone"],
        state=instance["State"]["Name"],
        public_address=instance.get("PublicIpAddress") or "",
        private_address=instance.get("PrivateIpAddress") or "",
        launched=instance["LaunchTime"],
        tags=tags,
    )
