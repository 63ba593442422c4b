"""Describe, for submitted jobs, which instances the cluster can have."""

from typing import Any

import settings
from cluster.aws import quotas, vpc
from cluster.common import prices
from cluster.common.cluster_file import ClusterFile, NodeType
from instance_types import INSTANCE_TYPES


def offers(file: ClusterFile) -> list[dict[str, Any]]:
    """Return the node types for training in the order in which pipeline/ray_support/gang.py tries them.

    Those with the highest priority come first. Among them, zones with a low spot price come first, because a low price
    shows that AWS has free capacity. Zones that do not offer the instance type, and markets with too small a quota, are
    left out, unless nothing else is left.
    """
    training = [worker for worker in file.workers if worker.zone]
    zones = _zones(file, training)
    impossible = _impossible(file, training, zones)
    dollars = prices.spot_prices(file, {worker.instance_type for worker in training})

    def order(worker: NodeType) -> tuple[float, float, str]:
        price = dollars.get(worker.instance_type, {}).get(zones[worker.name], float("inf"))
        return -worker.priority, price, worker.zone

    possible = [worker for worker in training if worker.name not in impossible] or training
    return [
        {"node_type": worker.name, "labels": file.content["available_node_types"][worker.name]["labels"]}
        for worker in sorted(possible, key=order)
    ]


def _zones(file: ClusterFile, workers: list[NodeType]) -> dict[str, str]:
    """Return the AWS zone of each node type, or "" for one whose zone has no number, which is that of a reservation.

    The launch templates in stack.yaml have the numbers of the network's zones.
    """
    zones = vpc.find_network(file, settings.load(vpc.NetworkSection, "network", profile="cluster")).zones
    return {worker.name: zones[int(worker.zone) - 1] if worker.zone.isdigit() else "" for worker in workers}


def _impossible(file: ClusterFile, workers: list[NodeType], zones: dict[str, str]) -> set[str]:
    """Return the names of the node types that AWS will refuse: their zone or their quota does not allow them."""
    types = sorted({worker.instance_type for worker in workers})
    offered = {
        (offer["InstanceType"], offer["Location"])
        for offer in file.client("ec2").describe_instance_type_offerings(
            LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": types}]
        )["InstanceTypeOfferings"]
    }
    known = {(worker.instance_type, worker.market) for worker in workers if worker.instance_type in INSTANCE_TYPES}
    without_quota = quotas.too_small(file, known)
    return {
        worker.name
        for worker in workers
        if (worker.instance_type, worker.market) in without_quota
        or (zones[worker.name] and (worker.instance_type, zones[worker.name]) not in offered)
    }


def possible_nodes(file: ClusterFile) -> list[dict[str, Any]]:
    """Return the resources and the maximum number of each instance type, for pipeline/ray_support/capacity.py.

    An instance type counts once, even if several node types use it in different zones and markets.
    """
    types = sorted({worker.instance_type for worker in file.workers})
    described = file.client("ec2").describe_instance_types(InstanceTypes=types)["InstanceTypes"]
    return [
        {
            "instance_type": one["InstanceType"],
            "resources": {"CPU": one["VCpuInfo"]["DefaultVCpus"]} | _gpus(one),
            "count": max(worker.max_workers for worker in file.workers if worker.instance_type == one["InstanceType"]),
        }
        for one in described
    ]


def _gpus(described: dict[str, Any]) -> dict[str, int]:
    """Return the number of GPUs, and what Ray calls their type."""
    gpus = described.get("GpuInfo", {}).get("Gpus", [])
    return {"GPU": sum(gpu["Count"] for gpu in gpus), f"accelerator_type:{gpus[0]['Name']}": 1} if gpus else {}
