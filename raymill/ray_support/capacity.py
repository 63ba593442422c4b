"""Checks, before a job starts, that the cluster is large enough and that all its nodes can read the job's files.

Without these checks, Ray would wait forever, or a worker would fail on a missing file.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ray

from raymill.errors import UserError
from raymill.job_context import JobContext


class NodeGroup(NamedTuple):
    """Nodes with the same resources."""

    resources: dict[str, float]
    count: int
    """Maximum number of these nodes in the cluster."""
    instance_type: str = ""
    """Instance type on AWS."""


def nodes() -> list[NodeGroup]:
    """Return all nodes that the cluster can have.

    For a cluster that can grow, `inv submit` sets CLUSTER_NODES, a JSON list such as
    [{"instance_type": "p4d.24xlarge", "resources": {"CPU": 96, "GPU": 8}, "count": 4}]. Without CLUSTER_NODES, return
    the running nodes.
    """
    if described := JobContext.current().cluster_nodes:
        return [NodeGroup(**node) for node in json.loads(described)]
    return [NodeGroup(node["Resources"], 1) for node in ray.nodes() if node["Alive"]]


def max_workers(needs: Mapping[str, float]) -> int:
    """Return the maximum number of workers that the cluster can hold.

    Each worker must fit on one node, and workers with GPUs run on nodes of the same instance type.
    """
    limits = Counter[str]()
    for group in nodes():
        fitting = min(int(group.resources.get(name, 0) // need) for name, need in needs.items())
        limits[group.instance_type if "GPU" in needs else ""] += group.count * fitting
    return max(limits.values(), default=0)


def max_gpus_per_node(accelerator_type: str | None) -> int:
    """Return the largest number of GPUs of this type, or of any type, that a node of the cluster can have."""
    resource = f"accelerator_type:{accelerator_type}" if accelerator_type else "GPU"
    return max((int(group.resources.get("GPU", 0)) for group in nodes() if resource in group.resources), default=0)


def refuse_too_many_workers(
    workers: int, needs: Mapping[str, float], decided_by: str = "cpus_per_worker and use_gpu in [train]"
) -> None:
    """Refuse more workers than the cluster can hold. `decided_by` names the settings that determine `needs`."""
    limit = max_workers(needs)
    if workers > limit:
        each = " and ".join(f"{need:g} {name}" for name, need in needs.items() if ":" not in name)
        raise UserError(
            f"num_workers = {workers}, with {each} for each, is more than the {limit} that this cluster can hold; "
            + (f"use --num-workers {limit}." if limit else f"change {decided_by} to fit.")
        )


def refuse_workers_on_every_cpu(cpus_of_workers: int) -> None:
    """Refuse a stream without a spare CPU, because its tasks and the workers would wait for each other."""
    cpus = int(sum(group.count * group.resources.get("CPU", 0) for group in nodes()))
    if cpus_of_workers >= cpus:
        raise UserError(
            f"--stream needs a spare CPU, but the workers take {cpus_of_workers} of {cpus}; use a smaller "
            "--num-workers, or train on preprocessed rows."
        )


def refuse_private_paths(paths: Mapping[str, str], shared_folders: Sequence[str], section: str) -> None:
    """Refuse a path that only one of several nodes can read.

    Args:
        paths: absolute paths, URIs or hub ids, keyed by the names of their settings in `section`.
        shared_folders: folders that every node mounts.
    """
    if sum(group.count for group in nodes()) == 1:
        return
    for key, path in paths.items():
        if os.path.isabs(path) and not any(Path(path).is_relative_to(folder) for folder in shared_folders):
            raise UserError(
                f"{key} = {path} is on the disk of one node, but this cluster has several; set --{key} to a URI such "
                "as s3://bucket/folder (for a model, a hub id). If all nodes mount its folder, add that "
                f"folder to shared_paths in [{section}]."
            )
