"""Describe, for submitted jobs, which instances the cluster can have."""

from typing import Any

from raymill import settings
from raymill.aws import quotas, vpc, zones
from raymill.aws.zones import Offers
from raymill.common import prices
from raymill.common.cluster_file import ClusterFile, NodeType
from raymill.instance_types import INSTANCE_TYPES
from raymill.ray_support import aws_sections
from raymill.ray_support.aws_sections import NetworkSection


def offers(file: ClusterFile) -> list[dict[str, Any]]:
    """Return the node types for training, in the order in which raymill/ray_support/gang.py tries them."""
    return _offers(file, [worker for worker in file.workers if worker.zone])


def serve_offers(file: ClusterFile) -> list[dict[str, Any]]:
    """Return the node types for serving in the same order, or [] if serving uses those for training."""
    wanted = aws_sections.load_gpu().serve_instance_type
    serving = [worker for worker in file.workers if _zone(worker) and worker.instance_type == wanted]
    return _offers(file, serving) if serving else []


def _offers(file: ClusterFile, workers: list[NodeType]) -> list[dict[str, Any]]:
    """Return the names and labels of these node types, in the order in which jobs try them.

    Those with the highest priority come first. Among them, zones with a low spot price come first, because a low price
    shows that AWS has free capacity. Zones that do not offer the instance type, and markets with too small a quota, are
    left out, unless nothing else is left.
    """
    offered = zones.offered(file)
    zone_of = _zones(file, workers, offered)
    impossible = _impossible(file, workers, zone_of, offered)
    dollars = prices.to_order_zones(file, {worker.instance_type for worker in workers})

    def order(worker: NodeType) -> tuple[float, float, str]:
        price = dollars.get(worker.instance_type, {}).get(zone_of[worker.name], float("inf"))
        return -worker.priority, price, _zone(worker)

    possible = [worker for worker in workers if worker.name not in impossible] or workers
    return [
        {"node_type": worker.name, "labels": file.content["available_node_types"][worker.name]["labels"]}
        for worker in sorted(possible, key=order)
    ]


def _zone(worker: NodeType) -> str:
    return worker.zone or worker.serve_zone


def _zones(file: ClusterFile, workers: list[NodeType], offered: Offers) -> dict[str, str]:
    """Return the AWS zone of each node type, or "" for one whose zone has no number, which is that of a reservation.

    The launch templates in stack.yaml have the numbers of the network's zones.
    """
    section = settings.load(NetworkSection, "network", profile="cluster")
    names = vpc.find_network(file, section, offered).zones
    return {worker.name: names[int(_zone(worker)) - 1] if _zone(worker).isdigit() else "" for worker in workers}


def _impossible(file: ClusterFile, workers: list[NodeType], zone_of: dict[str, str], offered: Offers) -> set[str]:
    """Return the names of the node types that AWS will refuse: their zone or their quota does not allow them."""
    known = {(worker.instance_type, worker.market) for worker in workers if worker.instance_type in INSTANCE_TYPES}
    without_quota = quotas.too_small(file, known)
    return {
        worker.name
        for worker in workers
        if (worker.instance_type, worker.market) in without_quota
        or (zone_of[worker.name] and zone_of[worker.name] not in offered[worker.instance_type])
    }


def possible_nodes(file: ClusterFile) -> list[dict[str, Any]]:
    """Return the resources and the maximum number of each instance type, for raymill/ray_support/capacity.py.

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
