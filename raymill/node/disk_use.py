"""Warns before a disk of this node is full. Then jobs fail, and Ray and the node can save neither logs nor state."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from raymill.common.cluster_file import target
from raymill.node import nvme

FOLDERS = (Path.home(), nvme.FOLDER)
"""A folder on each disk that is used. On instance types without NVMe disks, both are on the root disk."""
FREE_GB, FREE_SHARE = 20, 0.1
"""A disk with less free space than both is nearly full. The share applies to disks of less than 200 GB."""


def problem() -> str:
    """Return a sentence if a disk of this node is nearly full, or else ""."""
    if not (found := nearly_full()):
        return ""
    advice = f"When it is full, jobs fail and their logs are lost. Delete files there: inv ssh --target {target()}"
    return f"{found}. {advice}"


def nearly_full(folders: Iterable[Path] = FOLDERS) -> str:
    """Return which disk of this node is nearly full, or ""."""
    for folder in folders:
        try:
            disk = os.statvfs(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{socket.gethostname()} cannot read the disk with {folder} ({error})"
        free, size = disk.f_bavail * disk.f_frsize / 1e9, disk.f_blocks * disk.f_frsize / 1e9
        if free < min(FREE_GB, FREE_SHARE * size):
            return f"{socket.gethostname()} has {free:.1f} of {size:.0f} GB free on the disk with {folder}"
    return ""
