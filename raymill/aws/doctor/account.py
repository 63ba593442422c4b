"""The AWS account that the doctor checks, and the names of actions that AWS denies."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from raymill.aws import aws_errors
from raymill.common.cluster_file import ClusterFile, NodeType, target
from raymill.instance_types import INSTANCE_TYPES


def retry() -> str:
    """Return the advice at the end of findings about failed checks."""
    return f"Run again: inv doctor --target {target()}"


@dataclass(frozen=True)
class Account(ClusterFile):
    """The cluster file, the caller, and boto3 clients. Threads may share clients, but must not create them."""

    arn: str
    """ARN of the caller."""
    clients: dict[str, Any]

    def client(self, service: str) -> Any:
        return self.clients[service]


def alternatives(file: ClusterFile, node_type: NodeType) -> list[NodeType]:
    """Return the node types with GPUs that can do the same work, itself included: training or, without zone, serving.

    A node type without GPUs has no alternatives.
    """
    if node_type.instance_type not in INSTANCE_TYPES:
        return []
    with_gpus = [worker for worker in file.workers if worker.instance_type in INSTANCE_TYPES]
    return [worker for worker in with_gpus if bool(worker.zone) == bool(node_type.zone)]


def denied_action(error: ClientError, actions: Iterable[str]) -> str:
    """Return the IAM action that AWS denied, such as "ec2:RunInstances", without "ec2:" if the service is unknown.

    EC2's messages may name only the operation. If so, the service comes from a match in `actions`.
    """
    named = aws_errors.missing_permission(error)
    return next((action for action in actions if action.endswith(f":{named}")), named)
