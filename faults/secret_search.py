"""Search all files, command lines, S3 objects, dashboard responses and AWS calls of a cluster for a secret."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import requests

from faults.harness import Harness
from raymill import settings
from raymill.common import bucket
from raymill.emulator import scenario

MEMORY_FOLDERS = ("tmp", "run", "dev/shm")
DASHBOARD_PATHS = (
    *("/api/jobs/", "/api/cluster_status", "/api/serve/applications/", "/nodes?view=summary", "/api/version"),
    *("/api/v0/nodes", "/api/v0/actors?detail=true", "/api/v0/workers?detail=true", "/api/v0/tasks?detail=true"),
    *("/api/v0/jobs?detail=true", "/api/v0/runtime_envs?detail=true", "/api/v0/objects?detail=true"),
)
MAX_FILE_BYTES = 64 * 2**20
"""Larger files are not searched, because they are packages and models."""


def search(text: str, harness: Harness, only_in: set[str]) -> str:
    """Search for `text`, and return a summary of how many places of each kind were searched.

    Raises:
        AssertionError: the text is in a place outside `only_in`, or a place in `only_in` lacks it.
    """
    found: set[str] = set()
    counts: Counter[str] = Counter()
    for kind, places in {
        "files": _files(),
        "command lines": _command_lines(),
        "objects in the bucket": _objects(harness),
        "responses of the dashboard": _dashboard_responses(harness),
        "calls to AWS": [("a call to AWS", str(call).encode()) for call in scenario.cloud_state()["calls"]],
    }.items():
        for place, content in places:
            counts[kind] += 1
            if text.encode() in content:
                found.add(place)
    assert found >= only_in, f"the search does not find the secret in {', '.join(only_in - found)}"
    assert found == only_in, f"the secret is in {', '.join(found - only_in)}"
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _files() -> Iterator[tuple[str, bytes]]:
    """Yield the files of the project, of /tmp, which contains the hosts' disks, and of the hosts' in-memory folders."""
    hosts = {os.stat(f"/proc/{pid}/ns/mnt").st_ino: Path("/proc", pid, "root") for pid in _processes()}
    hosts.pop(os.stat("/proc/self/ns/mnt").st_ino)
    in_memory = [host / name for host in hosts.values() for name in MEMORY_FOLDERS]
    for folder in [Path("/tmp"), settings.PROJECT, *in_memory]:
        for path in _regular_files(folder):
            with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                yield str(path), path.read_bytes()


def _regular_files(folder: Path) -> Iterator[Path]:
    """Yield all but large files. Skip links, because packages are links into uv's cache."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != ".venv"]
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE_BYTES:
                yield path


def _command_lines() -> Iterator[tuple[str, bytes]]:
    for pid in _processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended in the meantime
            yield f"the command line of process {pid}", Path("/proc", pid, "cmdline").read_bytes()


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and os.path.exists(f"/proc/{name}/exe")]


def _objects(harness: Harness) -> Iterator[tuple[str, bytes]]:
    s3, name = harness.file.client("s3"), bucket.name(harness.file)
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=name):
        for entry in page.get("Contents", []):
            yield f"s3://{name}/{entry['Key']}", s3.get_object(Bucket=name, Key=entry["Key"])["Body"].read()


def _dashboard_responses(harness: Harness) -> Iterator[tuple[str, bytes]]:
    for path in DASHBOARD_PATHS:
        answer = requests.get(harness.connection.dashboard + path, headers=harness.connection.headers, timeout=60)
        assert answer.ok, f"{path}: {answer.status_code}"
        yield f"the dashboard's {path}", answer.content
