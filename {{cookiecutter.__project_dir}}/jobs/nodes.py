"""The machines of the cluster, and whether all of them can reach a path."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ray

from settings import Refusal


class Node(NamedTuple):
    """A kind of machine: its resources, and how many of it there can be."""

    resources: dict[str, float]
    count: int


def nodes() -> list[Node]:
    """All the machines that the cluster can ever have.

    A cluster that grows is described by CLUSTER_NODES, set by the verb that submits: a JSON list of
    {"resources": {"CPU": 96, "GPU": 8}, "count": 4}. Without it, it is what it is now.
    """
    if described := os.environ.get("CLUSTER_NODES"):
        return [Node(node["resources"], node["count"]) for node in json.loads(described)]
    return [Node(node["Resources"], 1) for node in ray.nodes() if node["Alive"]]


def refuse_private_paths(paths: Mapping[str, str], shared_paths: tuple[str, ...], section: str) -> None:
    """Refuse paths, by the names of their settings in `section`, that only one of several nodes can reach.

    Raises:
        Refusal: there are several nodes, and a path is a local one that lies in none of `shared_paths`.
    """
    if sum(node.count for node in nodes()) < 2:
        return
    for key, path in paths.items():
        if os.path.isabs(path) and not any(Path(path).is_relative_to(shared) for shared in shared_paths):
            raise Refusal(
                f"{key} = {path} is on the disk of one node, and this cluster has several; set --{key} to a URI such "
                f"as s3://bucket/folder, or name the folder that all nodes mount in shared_paths of [{section}]."
            )
