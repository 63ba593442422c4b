"""Copies this node's logs to the project's bucket while the cluster runs, because they are lost with the instance.

cluster.yaml starts it on every node. It is a process of its own, so that a slow bucket delays neither the lease nor the
limits, and so that it also copies the log of a watchdog that has died.
"""

import contextlib
import functools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raymill.common import bucket, cluster_file
from raymill.node import disk_use, gpu_use, metadata, notices, process, ray_jobs, state

log = logging.getLogger(__name__)
INTERVAL_S = 10.0
"""Time between two copies. A copy lags behind the log by this time and the time of the upload."""
MAX_BYTES = 8 * 2**20
"""Of a larger log, only the end is copied, because each change uploads the whole copy again."""
SESSION = Path("/tmp/ray/session_latest")
"""A link to the folder of Ray's session, whose name is the same on all nodes."""
LOG_FILE = Path("~/log_shipping.log").expanduser()
PATTERNS = ("job-driver-*.log", "monitor.*", "gcs_server.*", "raylet.*", "worker-*", "serve/*.log")
"""Ray's logs that are copied. Those of its agents are not, because they may contain a job's environment variables."""
HEAD = "head"
"""Name of the head's folder. A worker's folder is named after its host."""
REPORT = "node.json"
"""What `inv status` shows of each node. Its age shows whether the node copies its logs."""
SILENT_S = 120.0
"""A node whose report is older has stopped copying its logs. A copy takes seconds, a large first one longer."""
JOBS = "jobs.json"
JOB_FIELDS = (
    *("submission_id", "metadata", "entrypoint", "status", "message"),
    *("start_time", "end_time", "driver_exit_code"),
)
"""What the table of jobs has of each job. The other fields include the job's environment variables."""


class LogShipper:
    """Copies the logs that have changed since the last copy, to LOGS/SESSION/NODE/ in the bucket."""

    def __init__(self, role: str) -> None:
        self._node = HEAD if role == HEAD else socket.gethostname()
        self._copied: dict[str, tuple[int, int]] = {}
        self._ended = notices.EndedJobs()
        self._disk = ""
        """The problem of the disk at the last copy."""

    def ship(self) -> None:
        """Copy each new or changed log, then this node's report and, on the head, the table of jobs.

        Raises an exception if AWS does.
        """
        before, self._disk = self._disk, disk_use.problem()
        if self._disk and not before:
            notices.send(self._disk)
        session = SESSION.resolve(strict=True)
        folder = f"{bucket.LOGS}{session.name}/{self._node}/"
        for name, path in _logs(session / "logs"):
            with contextlib.suppress(FileNotFoundError):  # Ray has just rotated it
                self._copy(path, folder + name)
        report = {"instance": self._instance, "gpus": gpu_use.last(), "disk": self._disk}
        self._put(folder + REPORT, json.dumps(report).encode())
        if self._node == HEAD:
            jobs = _jobs()
            # even if nothing has changed: its age shows whether the cluster runs
            self._put(folder + JOBS, json.dumps(jobs).encode())
            for sentence in self._ended.news(jobs):
                notices.send(sentence)

    def _copy(self, path: Path, key: str) -> None:
        now = path.stat()
        version = (now.st_size, now.st_mtime_ns)
        if now.st_size and self._copied.get(key) != version:
            self._put(key, _end(path))
            self._copied[key] = version

    def _put(self, key: str, body: bytes) -> None:
        name, client = self._bucket
        client.put_object(Bucket=name, Key=key, Body=body)

    @functools.cached_property
    def _instance(self) -> str:
        return metadata.read("instance-id")

    @functools.cached_property
    def _bucket(self) -> tuple[str, Any]:
        """Return the bucket's name, for which this asks AWS, and a client."""
        file = cluster_file.load()
        return bucket.name(file), file.client("s3")


def _logs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name in the bucket and the path of each log."""
    for pattern in PATTERNS:
        yield from ((str(path.relative_to(folder)), path) for path in folder.glob(pattern))
    yield from ((path.name, path) for path in (state.LOG_FILE, LOG_FILE, gpu_use.FILE))


def _end(path: Path) -> bytes:
    """Return a log's content. Of a large log, return the last whole lines, after a line that says so."""
    with path.open("rb") as log:
        skipped = max(0, os.fstat(log.fileno()).st_size - MAX_BYTES)
        log.seek(skipped)
        content = log.read()
    if not skipped:
        return content
    return b"[this copy lacks the beginning of the log]\n" + content.partition(b"\n")[2]


def _jobs() -> list[dict[str, Any]]:
    """Return the submitted jobs. Raises `OSError` if Ray's dashboard does not answer."""
    return [{field: job[field] for field in JOB_FIELDS} for job in ray_jobs.all_jobs() if job["submission_id"]]


def ship_forever(role: str) -> None:
    """Copy the logs every INTERVAL_S. `role` is this node's role: "head" or "worker". Never returns."""
    shipper = LogShipper(role)
    while True:
        try:
            shipper.ship()
        except Exception as error:  # for example, if S3 does not answer; the next copy has what this one lacks
            log.warning("not all logs were copied to the bucket: %s", error)
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    process.write_log()
    process.take_over("log_shipping")
    threading.Thread(target=gpu_use.record, daemon=True).start()  # nvidia-smi hangs if a GPU is broken
    ship_forever(sys.argv[1])
