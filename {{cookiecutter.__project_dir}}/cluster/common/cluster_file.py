"""What the verbs read of cluster.yaml: the names that everything on AWS carries, and the machines that it may rent."""

import hashlib
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import yaml

import settings

FILE = settings.PROJECT / "cluster" / "cluster.yaml"
PINS = settings.PROJECT / "requirements" / "cluster.txt"
GPUS_A_MACHINE = 8
"""Of p4d and p4de alike."""
REHEARSAL = "REHEARSAL"
"""In the environment of what runs inside the emulated AWS."""
TARGET = "rehearsal" if REHEARSAL in os.environ else "aws"
"""What the verbs to type next are told as --target."""


@dataclass(frozen=True)
class NodeType:
    """One entry of `available_node_types`."""

    name: str
    instance_type: str
    market: str
    """"spot", "on-demand" or "capacity-block"."""
    most: int
    """The most of it at once."""
    zone: str
    """Its label `zone`, by which a training gang stays together; empty without one."""
    priority: int
    """Among types that fit, Ray asks for the highest first."""
    node_config: dict[str, Any]


@dataclass(frozen=True)
class ClusterFile:
    """cluster.yaml, read."""

    content: dict[str, Any]
    digest: str
    """Changes with what a cluster is set up from: the file, the nodes' pins, the limits in settings.toml."""

    @property
    def slug(self) -> str:
        """Name of the cluster, and of all that it has on AWS."""
        return self.content["cluster_name"]

    @property
    def region(self) -> str:
        return self.content["provider"]["region"]

    @property
    def auth(self) -> dict[str, Any]:
        """How ssh reaches machines, in Ray's own names."""
        return self.content["auth"]

    @property
    def key_file(self) -> Path:
        return Path(self.auth["ssh_private_key"]).expanduser()

    @property
    def most_workers(self) -> int:
        return self.content["max_workers"]

    @property
    def head(self) -> NodeType:
        return self._node_type(self.content["head_node_type"])

    @property
    def workers(self) -> list[NodeType]:
        return [self._node_type(name) for name in self.content["available_node_types"] if name != self.head.name]

    def client(self, service: Any) -> Any:  # a str; boto3's types know a function for each name
        """boto3's client for a service in this cluster's region."""
        return boto3.client(service, region_name=self.region)

    def _node_type(self, name: str) -> NodeType:
        body = self.content["available_node_types"][name]
        config = body["node_config"]
        return NodeType(
            name=name,
            instance_type=config["InstanceType"],
            market=config.get("InstanceMarketOptions", {}).get("MarketType", "on-demand"),
            most=min(body.get("max_workers", 1), self.most_workers),
            zone=body.get("labels", {}).get("zone", ""),
            priority=body.get("priority", 0),
            node_config=config,
        )


def load(file: Path = FILE) -> ClusterFile:
    """Read the cluster file. Raises `settings.UserError` when it is not YAML or lacks what the verbs need."""
    try:
        text = file.read_text(encoding="utf-8")
        limits = tomllib.loads(settings.FILE.read_text(encoding="utf-8")).get("cluster", {}).get("limits")
        digest = hashlib.sha256(f"{text}{PINS.read_text(encoding='utf-8')}{limits}".encode()).hexdigest()[:16]
        read = ClusterFile(yaml.safe_load(text), digest)
        _ = (read.slug, read.region, read.key_file, read.auth["ssh_user"], read.head, read.workers)
    except FileNotFoundError as error:
        raise settings.UserError(
            f"{error.filename} is missing; restore it with: git checkout {error.filename}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise settings.UserError(f"settings.toml is not valid TOML: {error}; correct that line.") from None
    except yaml.YAMLError as error:
        raise settings.UserError(
            f"{file} is not valid YAML: {' '.join(str(error).split())}; correct that line."
        ) from None
    except (KeyError, TypeError) as error:
        raise settings.UserError(f"{file} lacks {error}; compare it with: git diff {file}") from None
    return read
