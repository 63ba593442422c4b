"""The AWS account that the doctor checks, and words for what AWS does not allow."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from cluster.aws import aws_errors
from cluster.common.cluster_file import TARGET, ClusterFile

RETRY = f"Run again: inv doctor --target {TARGET}"


@dataclass(frozen=True)
class Account(ClusterFile):
    """The cluster file, its caller on AWS, and the clients. Threads may share clients, but must not create them."""

    arn: str
    """Of the caller."""
    clients: dict[str, Any]

    def client(self, service: str) -> Any:
        return self.clients[service]


def denied_action(error: ClientError, actions: Iterable[str]) -> str:
    """Return the denied IAM action, one of `actions`. Most services name it in their message, EC2 does not always."""
    named = aws_errors.missing_permission(error)
    return next((action for action in actions if action.endswith(f":{named}")), named)
