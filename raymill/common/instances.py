"""The cluster's instances on EC2."""

import datetime
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import botocore.exceptions

from raymill.common.cluster_file import ClusterFile

LIVING_STATES = ["pending", "running", "stopping", "stopped", "shutting-down"]
LAUNCH_FAILURES = re.compile(
    r"Client\.(InternalError|VolumeLimitExceeded|Invalid\w+)|Server\.(InternalError|InsufficientInstanceCapacity)"
)
"""Why EC2 terminates an instance before it runs, although EC2 accepted the launch. A missing permission for the key of
its encrypted disk is an InternalError.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/troubleshooting-launch.html#troubleshooting-launch-internal
"""
UNKNOWN_S = 30
"""How long EC2 may not know a new instance."""
FILES_TAG = "project-files"
"""Tag of the head. Its value is `ClusterFile.digest` at the head's last setup."""
NODE_CODE_TAG = "project-node-code"
"""Tag of the head. Its value is `node_code.digest` of the code that runs on the nodes."""


@dataclass(frozen=True)
class Instance:
    """One instance on EC2."""

    id: str
    node_type: str
    instance_type: str
    image: str
    market: str
    zone: str
    state: str
    public_address: str
    private_address: str
    launched: datetime.datetime
    tags: dict[str, str]
    end_code: str
    """Code of the reason why the instance ended, such as "Client.UserInitiatedShutdown". Empty if it has not."""
    end_reason: str
    """The reason in EC2's words, which begin with the code."""

    @property
    def age_s(self) -> float:
        return (datetime.datetime.now(datetime.UTC) - self.launched).total_seconds()


def living(file: ClusterFile) -> list[Instance]:
    """Return all instances of the project that are not terminated, the head first."""
    return _find(file, LIVING_STATES)


def failed_launches(file: ClusterFile) -> list[Instance]:
    """Return the instances of the project that EC2 terminated during their launch. EC2 lists them for an hour."""
    return [one for one in _find(file, ["terminated"]) if LAUNCH_FAILURES.match(one.end_code)]


def _find(file: ClusterFile, states: list[str]) -> list[Instance]:
    filters = [
        {"Name": "tag:ray-project", "Values": [file.slug]},
        {"Name": "instance-state-name", "Values": states},
    ]
    pages = file.client("ec2").get_paginator("describe_instances").paginate(Filters=filters)
    found = [
        _from_ec2(instance)
        for page in pages
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
    ]
    return sorted(found, key=lambda instance: (instance.node_type != file.head.name, instance.launched))


def head(file: ClusterFile) -> Instance | None:
    """Return the running head, or None."""
    heads = [one for one in living(file) if one.node_type == file.head.name and one.state == "running"]
    return heads[0] if heads else None


def terminate(file: ClusterFile, ids: Sequence[str]) -> None:
    """Terminate instances in the order of their ids. If EC2 refuses to terminate some, terminate the others.

    EC2 rejects an entire call because of one instance, such as one that it does not know for some seconds after its
    launch, or not any more. An instance that it does not know for UNKNOWN_S is gone.

    Raises:
        botocore.exceptions.ClientError: EC2 refuses to terminate an instance.
    """
    ec2, left, refusal = file.client("ec2"), list(ids), None
    try:
        ec2.terminate_instances(InstanceIds=left)
    except botocore.exceptions.ClientError:
        pass  # because of one of them
    else:
        return
    deadline = time.monotonic() + UNKNOWN_S
    while left and time.monotonic() <= deadline:
        for one in list(left):
            try:
                ec2.terminate_instances(InstanceIds=[one])
            except botocore.exceptions.ClientError as error:
                if error.response["Error"]["Code"] == "InvalidInstanceID.NotFound":
                    continue
                refusal = error
            left.remove(one)
        if left:
            time.sleep(1)
    if refusal:
        raise refusal


def _from_ec2(instance: dict[str, Any]) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
    reason = instance.get("StateReason", {})
    return Instance(
        id=instance["InstanceId"],
        node_type=tags.get("ray-user-node-type", ""),
        instance_type=instance["InstanceType"],
        image=instance["ImageId"],
        market=instance.get("InstanceLifecycle") or "on-demand",
        zone=instance["Placement"]["AvailabilityZone"],
        state=instance["State"]["Name"],
        public_address=instance.get("PublicIpAddress") or "",
        private_address=instance.get("PrivateIpAddress") or "",
        launched=instance["LaunchTime"],
        tags=tags,
        end_code=reason.get("Code", ""),
        end_reason=reason.get("Message", ""),
    )
