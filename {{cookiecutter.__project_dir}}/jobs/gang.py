"""Brings all machines of a training into one zone: between zones traffic is slow and costs money, and a gang that is
half there is paid for and does nothing."""

import itertools
import os
import time
from collections.abc import Mapping

import ray
from ray.util.placement_group import placement_group, remove_placement_group

LINE_EVERY_S = 30


def gather(workers: int, needs: Mapping[str, float], patience_s: float) -> dict[str, str] | None:
    """Wait until one zone has room for all workers, each with its `needs`; returns the label selector of that zone.

    GANG_ZONES, set by the verb that submits, lists the zones of the cluster file; where it is not set, as on one
    machine, there is nothing to gather and the answer is None. A zone that is not complete after `patience_s` is given
    up, whereupon the autoscaler ends what came there, and the next is tried; after the last the first again.
    """
    zones = [zone for zone in os.environ.get("GANG_ZONES", "").split(",") if zone]
    if not zones:
        return None
    for zone in itertools.cycle(zones):
        if _is_complete(zone, workers, needs, patience_s):
            return {"zone": zone}
        print(f"zone {zone} has no room for all {workers} workers after {patience_s:.0f} s: trying another", flush=True)
    raise AssertionError("a cycle does not end")


def _is_complete(zone: str, workers: int, needs: Mapping[str, float], patience_s: float) -> bool:
    """Reserve the workers' places; the machines that came for them stay for a while when they are given back."""
    group = placement_group([dict(needs)] * workers, bundle_label_selector=[{"zone": zone}] * workers)
    started = time.monotonic()
    try:
        while (waited := time.monotonic() - started) < patience_s:
            if ray.wait([group.ready()], timeout=min(LINE_EVERY_S, patience_s - waited))[0]:
                return True
            print(
                f"waiting for machines for {workers} workers in zone {zone}: {waited + LINE_EVERY_S:.0f} s", flush=True
            )
        return False
    finally:
        remove_placement_group(group)
