"""Waits until this machine's NVMe disks are mounted. Setup commands run it before they make folders there.

A service of AWS's image formats and mounts the disks at boot, and may still be at work when ssh already answers.
Folders that are made before would be on the root disk, and hidden by the mount. This module runs on the image's Python,
so it imports only the standard library.
https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-base-gpu-ami-ubuntu-24-04.html
"""

import sys
import time
from pathlib import Path

from raymill.instance_types import INSTANCE_TYPES
from raymill.node import metadata

FOLDER = Path("/opt/dlami/nvme")
"""AWS's image mounts the NVMe disks here. On instance types without NVMe disks, it is a folder on the root disk."""
TIMEOUT_S = 180.0
INTERVAL_S = 1.0


def main() -> None:
    """Wait for the mount if this machine's type has NVMe disks. Exit with an error after TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    while (name := _instance_type()) is None and time.monotonic() < deadline:
        time.sleep(INTERVAL_S)
    instance_type = INSTANCE_TYPES.get(name or "")
    if instance_type is None or not instance_type.nvme_gb:
        return
    while not FOLDER.is_mount():
        if time.monotonic() > deadline:
            sys.exit(
                f"error: this {instance_type.name} is not fit for work: its NVMe disks are not mounted at {FOLDER} "
                f"after {TIMEOUT_S:.0f} s"
            )
        time.sleep(INTERVAL_S)


def _instance_type() -> str | None:
    """Return this machine's type, or None if the metadata service does not answer yet."""
    try:
        return metadata.read("instance-type")
    except OSError:
        return None


if __name__ == "__main__":
    main()
