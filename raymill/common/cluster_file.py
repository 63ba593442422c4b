"""Read cluster.yaml: the names of the project's resources on AWS, and the instances that it may rent."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raymill import settings
from raymill.common import aws_session
from raymill.errors import UserError

FILE = settings.PROJECT / "cluster" / "cluster.yaml"
PINS = settings.PROJECT / "requirements" / "cluster.txt"
CAPACITY_BLOCK = "capacity-block"
"""Market of instances that are paid in advance."""
REHEARSAL = "REHEARSAL"
"""Environment variable of processes inside the emulated AWS."""


def target() -> str:
    """Return the value of --target for commands in messages."""
    return "rehearsal" if REHEARSAL in os.environ else "aws"


@dataclass(frozen=True)
class NodeType:
    """One entry of `available_node_types`."""

    name: str
    instance_type: str
    market: str
    """"spot", "on-demand" or "capacity-block"."""
    max_workers: int
    """Maximum number of instances at once."""
    zone: str
    """Value of the label `zone`, which keeps a training gang in one zone. Empty if there is no such label."""
    serve_zone: str
    """The same for node types that only serving uses: value of the label `serve_zone`."""
    priority: int
    """Among types that fit, Ray requests the one with the highest priority first."""
    node_config: dict[str, Any]


@dataclass(frozen=True)
class ClusterFile:
    """The content of cluster.yaml."""

    content: dict[str, Any]
    digest: str
    """Hash of cluster.yaml and the pins. If it changes, `up` sets up the head again."""

    @property
    def slug(self) -> str:
        """Name of the cluster, and name or prefix of its resources on AWS."""
        return self.content["cluster_name"]

    @property
    def region(self) -> str:
        return self.content["provider"]["region"]

    @property
    def auth(self) -> dict[str, Any]:
        """Ray's settings for ssh."""
        return self.content["auth"]

    @property
    def key_file(self) -> Path:
        return Path(self.auth["ssh_private_key"]).expanduser()

    @property
    def max_workers(self) -> int:
        return self.content["max_workers"]

    @property
    def head(self) -> NodeType:
        return self._node_type(self.content["head_node_type"])

    @property
    def workers(self) -> list[NodeType]:
        return [self._node_type(name) for name in self.content["available_node_types"] if name != self.head.name]

    def role(self, part: str) -> str:
        """Return the name of the role, and of its instance profile, such as "head". IAM's names are global."""
        return f"{self.slug}-{self.region}-{part}"

    def client(self, service: Any) -> Any:  # Any, because boto3's types have an overload for each service's name
        """Return a boto3 client for the named service in this cluster's region."""
        return aws_session.client(service, self.region)

    def _node_type(self, name: str) -> NodeType:
        body = self.content["available_node_types"][name]
        config = body["node_config"]
        return NodeType(
            name=name,
            instance_type=config["InstanceType"],
            market=config.get("InstanceMarketOptions", {}).get("MarketType", "on-demand"),
            max_workers=min(body.get("max_workers", 1), self.max_workers),
            zone=body.get("labels", {}).get("zone", ""),
            serve_zone=body.get("labels", {}).get("serve_zone", ""),
            priority=body.get("priority", 0),
            node_config=config,
        )


def load(file: Path = FILE) -> ClusterFile:
    """Read the cluster file. Raises `UserError` if this file or one that it needs is missing or invalid."""
    try:
        text = file.read_text(encoding="utf-8")
        digest = hashlib.sha256(f"{text}{PINS.read_text(encoding='utf-8')}".encode()).hexdigest()[:16]
        read = ClusterFile(yaml.safe_load(text), digest)
        _ = (read.slug, read.region, read.key_file, read.auth["ssh_user"], read.head, read.workers)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing. Run: git checkout {error.filename}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(error).split())}. Correct that line") from None
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} lacks {error}. See what changed: git diff {file}") from None
    return read
