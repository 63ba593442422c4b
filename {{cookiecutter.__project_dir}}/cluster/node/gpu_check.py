"""Checks a worker's GPUs and disks at the end of its setup. If the check fails, the autoscaler replaces the machine.

AWS sometimes hands out a machine with a broken part, on which a job would fail much later.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import settings
from cluster.node import metadata
from instance_types import INSTANCE_TYPES, InstanceType

FIRST_DRIVER = 580
"""CUDA 13, for which torch and vLLM are built, needs this driver or a later one."""
NVME = Path("/opt/dlami/nvme")
"""AWS's image mounts the NVMe disks here."""
TIMEOUT_S = 60.0
"""nvidia-smi hangs on some broken GPUs."""
QUERY = "--query-gpu=driver_version,ecc.errors.uncorrected.volatile.total"
LINE = re.compile(r"(\d+)([\d.]*), (.+)")
"""A sound GPU's line in the answer to QUERY. For a broken one, nvidia-smi prints a sentence."""


def check(instance_type: InstanceType) -> None:
    """Check this machine against what its type promises.

    Raises:
        settings.UserError: something is missing or broken.
    """
    if problems := list(_problems(instance_type)):
        raise settings.UserError(f"this {instance_type.name} is not fit for work: {'; '.join(problems)}")


def _problems(instance_type: InstanceType) -> Iterator[str]:
    gpus = _gpus()
    if len(gpus) != instance_type.gpus:
        yield f"it has {len(gpus)} of {instance_type.gpus} GPUs"
    for major, minor in sorted({(major, minor) for major, minor, _ in gpus}):
        if int(major) < FIRST_DRIVER:
            yield f"the image's NVIDIA driver is {major}{minor}, but CUDA 13 needs {FIRST_DRIVER} or later"
    for number, (_, _, errors) in enumerate(gpus):
        if errors.isdecimal() and int(errors):  # "[N/A]" for GPUs without ECC
            yield f"GPU {number} has {errors} uncorrectable memory errors"
    if instance_type.nvme_gb and not NVME.is_mount():
        yield f"its NVMe disks are not mounted at {NVME}"


def _gpus() -> list[tuple[str, ...]]:
    """Return the driver's major version, the rest of its version and the number of memory errors of each sound GPU."""
    try:
        command = ["nvidia-smi", QUERY, "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return [found.groups() for line in answer.splitlines() if (found := LINE.fullmatch(line))]


def main() -> None:
    """Check this machine if it has GPUs."""
    if instance_type := INSTANCE_TYPES.get(metadata.read("instance-type")):
        try:
            check(instance_type)
        except settings.UserError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
