"""Brings all machines of a training into one zone: between zones traffic is slow and costs money, and a gang that is
half there is paid for and does nothing."""

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray
from ray.autoscaler.v2.schema import ClusterStatus
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.placement_group import placement_group, remove_placement_group

LINE_EVERY_S = 30
ASKED_WITHIN_S = 20


class Offer(NamedTuple):
    """A place where machines may be had."""

    node_type: str
    zone: str
    market: str


def offers() -> list[Offer]:
    """What GANG_OFFERS lists, set by the verb that submits: the first to be tried first. None on one machine."""
    return [Offer(**offer) for offer in json.loads(os.environ.get("GANG_OFFERS", "[]"))]


def gather(
    workers: int, needs: Mapping[str, float], patience_s: float, places: Sequence[Offer]
) -> dict[str, str] | None:
    """Wait until one place has room for all workers, each with its `needs`; returns the label selector of its zone.

    A place that AWS refuses, or that is not complete after `patience_s`, is given up, whereupon the autoscaler ends
    what came there, and the next is tried; after the last the first again. Without places there is nothing to gather.
    """
    for place in itertools.cycle(places):
        failure = _try(place, workers, needs, patience_s)
        if failure is None:
            return {"zone": place.zone}
        print(f"zone {place.zone}, {place.market}: {failure}; trying the next", flush=True)
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
            status = get_cluster_status(ray.get_runtime_context().gcs_address)
            if _is_refused(place, status, started):
                return "AWS refuses machines"  # inv status has its words
            if time.time() - started > ASKED_WITHIN_S and not _is_coming(place, status):
                return "no machine is asked for"  # the steward keeps a refused type closed for a while
            if time.time() - said > LINE_EVERY_S:
                said = time.time()
                print(
                    f"waiting for {workers} workers in zone {place.zone}, {place.market}: {said - started:.0f} s",
                    flush=True,
                )
        return f"no room for all {workers} workers after {patience_s:.0f} s"
    finally:
        remove_placement_group(group)


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
