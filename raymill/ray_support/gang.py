"""Gang scheduling: gathers all machines of a training run, or of a served model's replica, in one zone.

Traffic between zones is slow and costs money, and a partial allocation costs money but cannot train.
"""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group, remove_placement_group

from raymill.job_context import JobContext
from raymill.ray_support.private import core
from raymill.ray_support.private.core import ClusterStatus, cluster_status
from raymill.ray_support.workers import WorkerOptions

PROGRESS_INTERVAL_S = 30
REQUEST_TIMEOUT_S = 20  # within this time, the autoscaler requests machines, unless the watchdog blocks their type
RELEASE_TIMEOUT_S = 120
SETUP_TIMEOUT_S = 1800  # a machine boots and installs 10 GB of packages
RESIZE_INTERVAL_S = 300  # not shorter, because each resize of a run repeats the steps since the last checkpoint


class Offer(NamedTuple):
    """A node type of the cluster file. It is in one zone and market, and has one instance type."""

    node_type: str
    labels: dict[str, str]
    """`zone` (`serve_zone` for node types that only serving uses), `market` and, if the cluster has several instance
    types for training, `instance_type`."""

    @property
    def selector(self) -> dict[str, str]:
        """The labels that all workers of a run share. A dead worker may be replaced from another market."""
        return {key: value for key, value in self.labels.items() if key != "market"}

    @property
    def zone(self) -> str:
        return self.labels.get("zone") or self.labels["serve_zone"]

    @property
    def kind(self) -> str:
        """The market and, if the labels name it, the instance type."""
        return ", ".join(self.labels[key] for key in ("market", "instance_type") if key in self.labels)


def offers() -> list[Offer]:
    """Return the offers for training, in the order in which to try them."""
    return _read_offers(JobContext.current().gang_offers)


def serve_offers() -> list[Offer]:
    """Return the offers for serving, in the order in which to try them."""
    return _read_offers(JobContext.current().serve_offers) or offers()


def _read_offers(offers: str | None) -> list[Offer]:
    """Return the offers in this JSON, which `inv submit` passes to jobs on AWS."""
    return [Offer(**offer) for offer in json.loads(offers or "[]")]


def scaling(options: WorkerOptions) -> ScalingConfig:
    """Wait until a zone has room for the minimum number of workers. Return Ray Train's scaling configuration."""
    return ScalingConfig(
        num_workers=options.num_workers,
        use_gpu=options.use_gpu,
        resources_per_worker=options.worker_resources,
        label_selector=find_zone(options),
        elastic_resize_monitor_interval_s=RESIZE_INTERVAL_S,
    )


def find_zone(options: WorkerOptions) -> dict[str, str] | None:
    """Return the label selector of a zone with room for the minimum number of workers (see `gather`)."""
    return gather(options.min_workers, options.worker_resources, options.zone_timeout_s, offers())


def gather(
    workers: int, needs: Mapping[str, float], timeout_s: float, candidates: Sequence[Offer]
) -> dict[str, str] | None:
    """Wait until one zone has room for all workers, and return its label selector.

    Tries the candidates in turn until one succeeds. If AWS refuses machines for a candidate, or if some are missing
    after `timeout_s`, those that arrived are released. Without candidates, returns None. A trial of `tune` uses the
    selector in GANG_SELECTOR, which the search found.

    Args:
        needs: the resources of each worker.
    """
    if selector := JobContext.current().gang_selector:
        return json.loads(selector)
    for offer in itertools.cycle(candidates):
        failure = _reserve(offer, workers, needs, timeout_s)
        if failure is None:
            return offer.selector
        print(f"zone {offer.zone}, {offer.kind}: {failure}{_release(offer)}; trying the next", flush=True)
        if offer is candidates[-1]:
            print(f"no zone has room for {workers} workers; trying all of them again", flush=True)
            time.sleep(PROGRESS_INTERVAL_S)
    return None


def _reserve(offer: Offer, workers: int, needs: Mapping[str, float], timeout_s: float) -> str | None:
    """Wait for the machines of all workers. Return why they did not arrive, or None if they did.

    While AWS has started all requested machines and their setup runs, `timeout_s` does not count, for SETUP_TIMEOUT_S.

    The reservation ends when this function returns. The machines stay up for their idle timeout, so the run can start
    on them.
    """
    group = placement_group([dict(needs)] * workers, bundle_label_selector=[offer.labels] * workers)
    started = last_printed = time.time()
    deadline = started + timeout_s
    try:
        while time.time() < deadline:
            if ray.wait([group.ready()], timeout=3)[0]:
                return None
            status = cluster_status(ray.get_runtime_context().gcs_address)
            if _is_refused(offer, status, started):
                return "AWS refuses machines"  # `inv status` prints AWS's reason
            if time.time() - started > REQUEST_TIMEOUT_S and not _is_requested(offer, status):
                return "no machine was requested"  # after AWS refuses a type, the watchdog blocks it for minutes
            if _are_starting(offer, status):
                deadline = min(time.time(), started + SETUP_TIMEOUT_S) + timeout_s
            if time.time() - last_printed > PROGRESS_INTERVAL_S:
                last_printed = time.time()
                print(
                    f"waiting for {workers} workers in zone {offer.zone}, {offer.kind}: {last_printed - started:.0f} s",
                    flush=True,
                )
        return f"no room for all {workers} workers after {time.time() - started:.0f} s"
    finally:
        remove_placement_group(group)


def _release(offer: Offer) -> str:
    """Wait until the unused machines of an offer are terminated. Return their number as a phrase for the log.

    Unused machines cost money and count towards max_workers. The autoscaler terminates those that are still starting
    (see cluster.yaml). Idle ones would stay for minutes, so this function drains them.
    """
    address = ray.get_runtime_context().gcs_address
    released, deadline = 0, time.time() + RELEASE_TIMEOUT_S
    while (unused := _unused(offer)) and time.time() < deadline:
        released = max(released, len(unused))
        for node_id in filter(None, unused):
            core.drain_idle(address, node_id, "partial gang")
        time.sleep(3)
    return f", {released} released" if released else ""


def _unused(offer: Offer) -> list[str | None]:
    """Return the Ray node id of each idle or starting machine of an offer, or None if it has not joined Ray."""
    status = cluster_status(ray.get_runtime_context().gcs_address)
    machines = [*status.idle_nodes, *status.pending_nodes]
    return [machine.node_id for machine in machines if machine.ray_node_type_name == offer.node_type]


def _is_refused(offer: Offer, status: ClusterStatus, since: float) -> bool:
    """Return whether AWS refused machines of this type at or after the time `since`."""
    return any(
        launch.ray_node_type_name == offer.node_type and (launch.failed_ts_s or 0) >= since
        for launch in status.failed_launches
    )


def _is_requested(offer: Offer, status: ClusterStatus) -> bool:
    """Return whether a machine of this type is running, starting or requested."""
    known = [*status.active_nodes, *status.idle_nodes, *status.pending_nodes, *status.pending_launches]
    return any(machine.ray_node_type_name == offer.node_type for machine in known)


def _are_starting(offer: Offer, status: ClusterStatus) -> bool:
    """Return whether machines of this type are starting, and none is still requested from AWS."""
    starting, requested = (
        any(machine.ray_node_type_name == offer.node_type for machine in machines)
        for machines in (status.pending_nodes, status.pending_launches)
    )
    return starting and not requested
