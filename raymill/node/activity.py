"""Finds out how long the cluster has been idle: no job ran or waited, and no application got a request.

Requests are POST requests to applications of Ray Serve, because health checks and web pages use GET. Ray counts them in
its metrics, which each node serves inside the cluster anyway.
"""

import json
import logging
import re
import urllib.request
from pathlib import Path

import psutil

from raymill.node import ray_jobs

log = logging.getLogger(__name__)
INTERVAL_S = 60.0
"""Time between two checks."""
TARGETS = Path("/tmp/ray/session_latest/prom_metrics_service_discovery.json")
"""Ray writes the addresses of its metrics to this file. https://docs.ray.io/en/latest/cluster/metrics.html"""
UNFINISHED = ("PENDING", "RUNNING")
"""States of a job that waits or runs."""
REQUESTS = re.compile(r'^ray_serve_num_http_requests_total\{(?=[^}]*method="POST")[^}]*\} (\S+)$', re.MULTILINE)


class Activity:
    """When the cluster was last in use."""

    def __init__(self, last: float, requests: float) -> None:
        """`last` is in seconds since the epoch. `requests` is the number of requests that were counted until then."""
        self.last = last
        self.requests = requests
        self._checked = 0.0

    def check(self, now: float) -> None:
        """Look for jobs and requests, at most every INTERVAL_S. If this is not possible, the cluster counts as used."""
        if now - self._checked < INTERVAL_S:
            return
        self._checked = now
        try:
            jobs, requests = ray_jobs.all_jobs(), count_requests()
        except Exception as error:  # whatever Ray answers; the watchdog has more to do
            log.warning("jobs and requests are unknown, so the cluster counts as used: %s", error)
            self.last = now
            return
        is_busy = any(job["status"] in UNFINISHED for job in jobs)
        self.last = now if is_busy else max([self.last, *((job["end_time"] or 0) / 1000 for job in jobs)])
        if requests != self.requests:  # fewer, if Serve was started again
            self.last, self.requests = now, requests


def count_requests() -> float:
    """Return how many POST requests this head has received since the start of Serve. Raises `OSError`.

    Serve's HTTP server runs on the head only (see raymill/serving/http_server.py).
    """
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    groups = json.loads(TARGETS.read_text())
    targets = [target for group in groups for target in group["targets"] if target.rpartition(":")[0] in own]
    total = 0.0
    for target in targets:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            total += sum(map(float, REQUESTS.findall(answer.read().decode())))
    return total
