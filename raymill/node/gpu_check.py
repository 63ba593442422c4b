"""Checks a worker's GPUs at the end of its setup. If the check fails, the autoscaler replaces the machine.

AWS sometimes hands out a machine with a broken part, on which a job would fail much later.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator

from raymill.errors import UserError
from raymill.instance_types import INSTANCE_TYPES, InstanceType
from raymill.node import metadata

FIRST_DRIVER = 580
"""CUDA 13, for which torch and vLLM are built, needs this driver or a later one."""
TIMEOUT_S = 60.0
"""nvidia-smi and CUDA hang on some broken GPUs."""
CUDA_TIMEOUT_S = 180.0
"""How long CUDA may take to become ready: until the fabric manager runs, which connects GPUs by NVSwitch, it answers
CUDA_ERROR_SYSTEM_NOT_READY (802). nvidia-smi shows sound GPUs before that.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
https://github.com/pytorch/pytorch/issues/35710
"""
CUDA_INTERVAL_S = 5.0
COUNT_GPUS = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)), count.value)
"""
"""Prints CUDA's error code, or 0, and the number of GPUs."""
QUERY = "--query-gpu=driver_version,ecc.errors.uncorrected.volatile.total"
LINE = re.compile(r"(\d+)([\d.]*), (.+)")
"""A sound GPU's line in the answer to QUERY. For a broken one, nvidia-smi prints a sentence."""


def check(instance_type: InstanceType) -> None:
    """Check this machine against what its type promises.

    Raises:
        UserError: something is missing or broken.
    """
    problems = list(_problems(instance_type))
    if not problems and (problem := _cuda_problem(instance_type)):  # which takes minutes if there is one
        problems = [problem]
    if problems:
        raise UserError(f"this {instance_type.name} is not fit for work: {'; '.join(problems)}")


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


def _gpus() -> list[tuple[str, ...]]:
    """Return the driver's major version, the rest of its version and the number of memory errors of each sound GPU."""
    try:
        command = ["nvidia-smi", QUERY, "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return [found.groups() for line in answer.splitlines() if (found := LINE.fullmatch(line))]


def _cuda_problem(instance_type: InstanceType) -> str:
    """Return why CUDA does not start with all GPUs, or "". Try again for CUDA_TIMEOUT_S."""
    deadline = time.monotonic() + CUDA_TIMEOUT_S
    while (problem := _start_cuda(instance_type)) and time.monotonic() < deadline:
        time.sleep(CUDA_INTERVAL_S)
    return problem


def _start_cuda(instance_type: InstanceType) -> str:
    """Return why CUDA does not start, or "".

    A new process starts it, because CUDA may hang, and may not start in a process in which it has failed before.
    """
    try:
        done = subprocess.run([sys.executable, "-c", COUNT_GPUS], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"CUDA does not start within {TIMEOUT_S:.0f} s"
    if done.returncode:
        return f"CUDA does not start: {(done.stderr.splitlines() or [f'exit code {done.returncode}'])[-1]}"
    error, count = map(int, done.stdout.split())
    if error:
        return f"CUDA does not start (error {error})"
    return "" if count == instance_type.gpus else f"CUDA finds {count} of {instance_type.gpus} GPUs"


def main() -> None:
    """Check this machine if it has GPUs."""
    if instance_type := INSTANCE_TYPES.get(metadata.read("instance-type")):
        try:
            check(instance_type)
        except UserError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
