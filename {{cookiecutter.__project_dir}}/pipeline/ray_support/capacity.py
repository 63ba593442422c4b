"""What a cluster can hold and reach, asked before a job starts that would wait for ever or not find its files."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ray

from settings import UserError


class Node(NamedTuple):
    """A kind of machine: its resources, and how many of it there can be."""

    resources: dict[str, float]
    count: int


def nodes() -> list[Node]:
    """All the machines that the cluster can ever have.

    A cluster that grows is described by CLUSTER_NODES, set by the verb that submits: a JSON list of
    {"resources": {"CPU": 96, "GPU": 8}, "count": 4}. Without it, the cluster is what it is now.
    """
    if described := os.environ.get("CLUSTER_NODES"):
        return [Node(node["resources"], node["count"]) for node in json.loads(described)]
    return [Node(node["Resources"], 1) for node in ray.nodes() if node["Alive"]]


def room(needs: Mapping[str, float]) -> int:
    """How many workers there will ever be room for; each `needs` its resources on one node."""
    return sum(
        node.count * min(int(node.resources.get(name, 0) // need) for name, need in needs.items()) for node in nodes()
    )


def refuse_too_many_workers(
    workers: int, needs: Mapping[str, float], decided_by: str = "cpus_per_worker and use_gpu in [train]"
) -> None:
    """Refuse more workers than there will ever be room for; each has its `needs`, which the settings `decided_by` ask
    for."""
    most = room(needs)
    if workers > most:
        each = " and ".join(f"{need:g} {name}" for name, need in needs.items())
        raise UserError(
            f"num_workers = {workers}, with {each} for each, is more than the {most} that this cluster can ever hold; "
            + (f"use --num-workers {most}." if most else f"set {decided_by} to what it has.")
        )


def refuse_workers_on_every_cpu(cpus_of_workers: int) -> None:
    """Refuse a stream without a CPU of its own: its tasks would wait for the workers, and the workers for them."""
    cpus = int(sum(node.count * node.resources.get("CPU", 0) for node in nodes()))
    if cpus_of_workers >= cpus:
        raise UserError(
            f"--stream needs a CPU beside those of the workers, which take {cpus_of_workers} of {cpus}; use a smaller "
            "--num-workers, or train on preprocessed rows."
        )


def refuse_private_paths(paths: Mapping[str, str], shared_folders: Sequence[str], section: str) -> None:
    """Refuse, on several nodes, a path that only one of them can read.

    `paths` are absolute, URIs or hub ids, by the names of their settings in `section`.
    """
    if sum(node.count for node in nodes()) == 1:
        return
    for key, path in paths.items():
        if os.path.isabs(path) and not any(Path(path).is_relative_to(folder) for folder in shared_folders):
            raise UserError(
                f"{key} = {path} is on the disk of one node, and this cluster has several; set --{key} to a URI such "
                "as s3://bucket/folder (for a model, a hub id), or name the folder that all nodes mount in "
                f"shared_paths of [{section}]."
            )
