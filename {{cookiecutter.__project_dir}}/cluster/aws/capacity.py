"""Describe, for submitted jobs, which instances the cluster can have."""

from typing import Any

from cluster.common.cluster_file import ClusterFile


def offers(file: ClusterFile) -> list[dict[str, str]]:
    """Return the workers' zones and markets in the order in which pipeline/ray_support/gang.py tries them."""
    zoned = [worker for worker in file.workers if worker.zone]
    return [
        {"node_type": worker.name, "zone": worker.zone, "market": worker.market}
        for worker in sorted(zoned, key=lambda worker: (-worker.priority, worker.zone))
    ]


def possible_nodes(file: ClusterFile) -> list[dict[str, Any]]:
    """Return the resources and the maximum number of each instance type, for pipeline/ray_support/capacity.py.

    An instance type counts once, even if several node types use it in different zones and markets.
    """
    types = sorted({worker.instance_type for worker in file.workers})
    described = file.client("ec2").describe_instance_types(InstanceTypes=types)["InstanceTypes"]
    return [
        {
            "resources": {"CPU": one["VCpuInfo"]["DefaultVCpus"]} | _gpus(one),
            "count": max(worker.max_workers for worker in file.workers if worker.instance_type == one["InstanceType"]),
        }
        for one in described
    ]


def _gpus(described: dict[str, Any]) -> dict[str, int]:
    gpus = described.get("GpuInfo", {}).get("Gpus", [])
    return {"GPU": sum(gpu["Count"] for gpu in gpus)} if gpus else {}
