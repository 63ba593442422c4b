"""Brings all machines of a training into one zone: between zones traffic is slow and costs money, and a gang that is
half there is paid for and does nothing."""

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group, remove_placement_group

from pipeline.ray_support.private import gcs
from pipeline.ray_support.private.autoscaler import ClusterStatus, cluster_status
from pipeline.ray_support.workers import WorkerOptions

LINE_EVERY_S = 30
ASKED_WITHIN_S = 20
GIVEN_BACK_WITHIN_S = 120
RESIZE_EVERY_S = 300  # growing costs the steps since the last checkpoint, and machines seldom come all at once


class Offer(NamedTuple):
    """A place where machines may be had."""

    node_type: str
    zone: str
    market: str


def offers() -> list[Offer]:
    """What GANG_OFFERS lists, set by the verb that submits: the first to be tried first. None on one machine."""
    return [Offer(**offer) for offer in json.loads(os.environ.get("GANG_OFFERS", "[]"))]


def scaling(options: WorkerOptions) -> ScalingConfig:
    """The workers of a training for Ray Train, once one zone has room for the fewest of them."""
    return ScalingConfig(
        num_workers=options.num_workers,
        use_gpu=options.use_gpu,
        resources_per_worker=options.worker_resources,
        label_selector=find_zone(options),
        elastic_resize_monitor_interval_s=RESIZE_EVERY_S,
    )


def find_zone(options: WorkerOptions) -> dict[str, str] | None:
    """The label selector of a zone that has room for the fewest workers of a training (see `gather`)."""
    return gather(options.min_workers, options.worker_resources, options.zone_timeout_s, offers())


def gather(
    workers: int, needs: Mapping[str, float], patience_s: float, places: Sequence[Offer]
) -> dict[str, str] | None:
    """Wait until one place has room for all workers, each with its `needs`; returns the label selector of its zone.

    A place that AWS refuses, or that is not complete after `patience_s`, is given up with the machines that came there,
    and the next is tried; after the last the first again. Without places there is nothing to gather, nor for a trial of
    a search (jobs/tune.py), which has done so and says where in GANG_ZONE.
    """
    if zone := os.environ.get("GANG_ZONE"):
        return {"zone": zone}
    for place in itertools.cycle(places):
        failure = _try(place, workers, needs, patience_s)
        if failure is None:
            return {"zone": place.zone}
        print(f"zone {place.zone}, {place.market}: {failure}{_give_back(place)}; trying the next", flush=True)
        if place is places[-1]:
            print(f"no zone and market has {workers} machines; trying all again", flush=True)
            time.sleep(LINE_EVERY_S)
    return None


def _try(place: Offer, workers: int, needs: Mapping[str, float], patience_s: float) -> str | None:
    """Reserve the workers' places; returns why it did not go, None when it did.

    The machines that came stay for their idle timeout when the reservation is given back, for the training to take.
    """
    labels = {"zone": place.zone, "market": place.market}
    group = placement_group([dict(needs)] * workers, bundle_label_selector=[labels] * workers)
    started, said = time.time(), time.time()
    try:
        while time.time() - started < patience_s:
            if ray.wait([group.ready()], timeout=3)[0]:
                return None
            status = cluster_status(ray.get_runtime_context().gcs_address)
            if _is_refused(place, status, started):
                return "AWS refuses machines"  # inv status has its words
            if time.time() - started > ASKED_WITHIN_S and not _is_coming(place, status):
                return "no machine is asked for"  # the watchdog keeps a refused type closed for a while
            if time.time() - said > LINE_EVERY_S:
                said = time.time()
                print(
                    f"waiting for {workers} workers in zone {place.zone}, {place.market}: {said - started:.0f} s",
                    flush=True,
                )
        return f"no room for all {workers} workers after {patience_s:.0f} s"
    finally:
        remove_placement_group(group)


def _give_back(place: Offer) -> str:
    """Wait until the machines of a place that nobody uses have ended; returns how many there were, in words.

    They are paid, and count in max_workers. The autoscaler ends those that are still being set up (cluster.yaml has it
    do so); those that are would idle for minutes.
    """
    address = ray.get_runtime_context().gcs_address
    most, deadline = 0, time.time() + GIVEN_BACK_WITHIN_S
    while (unused := _unused(place)) and time.time() < deadline:
        most = max(most, len(unused))
        for node_id in filter(None, unused):
            gcs.drain_idle(address, node_id, "half of a gang")
        time.sleep(3)
    return f", {most} given back" if most else ""


def _unused(place: Offer) -> list[str | None]:
    """Ray's id of each machine of a place that does nothing; None for one that is still being set up."""
    status = cluster_status(ray.get_runtime_context().gcs_address)
    machines = [*status.idle_nodes, *status.pending_nodes]
    return [machine.node_id for machine in machines if machine.ray_node_type_name == place.node_type]


def _is_refused(place: Offer, status: ClusterStatus, since: float) -> bool:
    """Whether AWS has refused machines of this type since then."""
    return any(
        launch.ray_node_type_name == place.node_type and (launch.failed_ts_s or 0) >= since
        for launch in status.failed_launches
    )


def _is_coming(place: Offer, status: ClusterStatus) -> bool:
    """Whether a machine of this type is there, or on its way."""
    here = [*status.active_nodes, *status.idle_nodes, *status.pending_nodes, *status.pending_launches]
    return any(machine.ray_node_type_name == place.node_type for machine in here)
