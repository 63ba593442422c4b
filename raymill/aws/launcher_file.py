"""The file that Ray's launcher reads: cluster/cluster.yaml, with the node types that the settings add.

cluster.yaml is what you edit, and Ray accepts it as it is. `inv prepare` also fills in the id of the image (images.py).
"""

import dataclasses
import hashlib
import json
from typing import Any

import yaml

from raymill import settings
from raymill.aws import gpu_node_types, reservation, source_hash, vpc
from raymill.aws.reservation import Reservation
from raymill.common import cluster_file
from raymill.common.cluster_file import CAPACITY_BLOCK, ClusterFile
from raymill.node.state import BLOCK_END
from raymill.ray_support.aws_sections import NetworkSection

MOUNTED = ".cluster/cluster.yaml"
"""The file's path in the project's folder, as in `file_mounts`."""
FILE = settings.PROJECT / MOUNTED
COPY_ON_NODES = "~/project/cluster/cluster.yaml"
"""The key of `file_mounts` for the nodes' copy, in which the watchdog reads the node types."""
AT_START = settings.PROJECT / "raymill" / "serving"
"""The folder of HAProxy's files. Unlike other code on the nodes, they cannot be replaced while Ray runs."""
RESERVED = "gpu-reserved"
"""Name of the node type for reserved instances."""
HEADER = (
    "# `inv prepare` and `inv up` write this file from cluster/cluster.yaml and settings.toml. Edit those instead.\n"
)


class _Dumper(yaml.SafeDumper):
    """Writes a value that occurs several times in full each time, instead of as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def load() -> ClusterFile:
    """Read cluster.yaml and add the node types. Raises `UserError` if a file is missing or invalid."""
    return resolved(cluster_file.load())


def resolved(file: ClusterFile) -> ClusterFile:
    """Return the file with the node types that the settings add, and with a digest of all that Ray starts with.

    A reservation that has ended or does not exist adds nothing, so that all verbs still work. `inv up` refuses it.
    """
    with_gpus = _with_node_types(file, gpu_node_types.apply(file))
    node_types = gpu_node_types.keep_runs_on_one_type(
        _reserved_node_type(with_gpus) | with_gpus.content["available_node_types"]
    )
    content = file.content
    if node_types != content["available_node_types"]:
        mounts = content["file_mounts"] | {COPY_ON_NODES: MOUNTED}
        content = content | {"available_node_types": node_types, "file_mounts": mounts}
    parts = f"{file.digest}{json.dumps(content)}{source_hash.of(AT_START.glob('haproxy*'))}"
    digest = hashlib.sha256(parts.encode()).hexdigest()[:16]
    return dataclasses.replace(file, content=content, digest=digest)


def _with_node_types(file: ClusterFile, node_types: dict[str, Any]) -> ClusterFile:
    return dataclasses.replace(file, content=file.content | {"available_node_types": node_types})


def write(file: ClusterFile) -> None:
    """Write the file for Ray's launcher."""
    FILE.parent.mkdir(exist_ok=True)
    text = yaml.dump(file.content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    FILE.write_text(HEADER + text, encoding="utf-8")


def _reserved_node_type(file: ClusterFile) -> dict[str, Any]:
    """Return the node type for reserved instances by its name, or {} if there is no reservation that can be used."""
    reserved = reservation.find(file)
    if reserved is None or reserved.has_ended:
        return {}
    market = CAPACITY_BLOCK if reserved.is_block else "on-demand"
    body = {
        "min_workers": 0,
        "max_workers": reserved.count,
        "priority": 1 + max(worker.priority for worker in file.workers),  # tried first, because it is paid for
        "resources": {},  # from EC2
        "labels": {"zone": _zone_label(file, reserved), "market": market},
        "node_config": _node_config(file, reserved),
    }
    return {RESERVED: body}


def _node_config(file: ClusterFile, reserved: Reservation) -> dict[str, Any]:
    """Return the parameters of the launch: those that all workers share, and those of the reservation."""
    shared = {key: value for key, value in file.workers[-1].node_config.items() if key != "InstanceMarketOptions"}
    config = shared | {
        "InstanceType": reserved.instance_type,
        "LaunchTemplate": {"LaunchTemplateName": f"{file.slug}-reserved", "Version": "$Latest"},
        "CapacityReservationSpecification": {"CapacityReservationTarget": {"CapacityReservationId": reserved.id}},
    }
    if reserved.is_block and reserved.end:
        config["InstanceMarketOptions"] = {"MarketType": CAPACITY_BLOCK}
        config["UserData"] += f"echo {reserved.end.isoformat()} > {BLOCK_END}\n"  # for watchdog_worker.py
    return config


def _zone_label(file: ClusterFile, reserved: Reservation) -> str:
    """Return the number of the reservation's zone, so that a run can continue there when the reservation ends.

    A zone in which the cluster has no other GPU types has no number, and gets a label of its own.
    """
    zones = vpc.find_network(file, settings.load(NetworkSection, "network", profile="cluster")).zones
    return str(zones.index(reserved.zone) + 1) if reserved.zone in zones else "reserved"
