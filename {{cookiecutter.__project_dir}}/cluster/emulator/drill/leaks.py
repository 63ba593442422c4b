"""Searches everything that a cluster writes, runs, stores and answers for a text that must be in none of it."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import requests

import settings
from cluster.common import bucket
from cluster.emulator import scenario
from cluster.emulator.drill.stage import Stage

IN_MEMORY = ("tmp", "run", "dev/shm")
ANSWERS = (
    *("/api/jobs/", "/api/cluster_status", "/api/serve/applications/", "/nodes?view=summary", "/api/version"),
    *("/api/v0/nodes", "/api/v0/actors?detail=true", "/api/v0/workers?detail=true", "/api/v0/tasks?detail=true"),
    *("/api/v0/jobs?detail=true", "/api/v0/runtime_envs?detail=true", "/api/v0/objects?detail=true"),
)
LARGEST = 64 * 2**20
"""Larger files are packages and models."""


def search(text: str, stage: Stage, only_in: set[str]) -> str:
    """Returns what was searched, in words.

    Raises:
        AssertionError: the text is in another place, which is named, or is not found where it has to be.
    """
    found: set[str] = set()
    counts: Counter[str] = Counter()
    for kind, places in {
        "files": _files(),
        "command lines": _command_lines(),
        "objects in the bucket": _objects(stage),
        "answers of the dashboard": _answers(stage),
        "calls to AWS": [("a call to AWS", str(call).encode()) for call in scenario.state()["calls"]],
    }.items():
        for place, content in places:
            counts[kind] += 1
            if text.encode() in content:
                found.add(place)
    assert found >= only_in, f"the search does not find the secret in {', '.join(only_in - found)}"
    assert found == only_in, f"the secret is in {', '.join(found - only_in)}"
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _files() -> Iterator[tuple[str, bytes]]:
    """The laptop's, what hosts wrote over their image, and the project's; then the hosts' file systems in memory."""
    hosts = {os.stat(f"/proc/{pid}/ns/mnt").st_ino: Path("/proc", pid, "root") for pid in _processes()}
    hosts.pop(os.stat("/proc/self/ns/mnt").st_ino)
    for folder in [Path("/tmp"), settings.PROJECT, *(host / name for host in hosts.values() for name in IN_MEMORY)]:
        for path in _regular_files(folder):
            with contextlib.suppress(FileNotFoundError):  # what runs also deletes
                yield str(path), path.read_bytes()


def _regular_files(folder: Path) -> Iterator[Path]:
    """Without links: packages are links into uv's cache."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != ".venv"]
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST:
                yield path


def _command_lines() -> Iterator[tuple[str, bytes]]:
    for pid in _processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            yield f"the command line of process {pid}", Path("/proc", pid, "cmdline").read_bytes()


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and os.path.exists(f"/proc/{name}/exe")]


def _objects(stage: Stage) -> Iterator[tuple[str, bytes]]:
    s3, name = stage.file.client("s3"), bucket.name(stage.file)
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=name):
        for entry in page.get("Contents", []):
            yield f"s3://{name}/{entry['Key']}", s3.get_object(Bucket=name, Key=entry["Key"])["Body"].read()


def _answers(stage: Stage) -> Iterator[tuple[str, bytes]]:
    for path in ANSWERS:
        answer = requests.get(stage.connection.dashboard + path, headers=stage.connection.headers, timeout=60)
        assert answer.ok, f"{path}: {answer.status_code}"
        yield f"the dashboard's {path}", answer.content
