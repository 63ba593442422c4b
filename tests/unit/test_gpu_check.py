"""Test what a worker must prove before it takes work: its GPUs, CUDA, and its NVMe disks."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from raymill.errors import UserError
from raymill.instance_types import INSTANCE_TYPES, InstanceType
from raymill.node import gpu_check, metadata, nvme

P4D = INSTANCE_TYPES["p4d.24xlarge"]
SOUND = "580.95.05, 0"
FAILS_ONCE = 'return open("asked", O_CREAT | O_EXCL, 0600) < 0 ? 0 : 802;'
"""In C: fail in the first process that asks."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with the machine's nvidia-smi and CUDA. If CUDA does not start, it is not tried again."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(gpu_check, "CUDA_TIMEOUT_S", 0.0)
    monkeypatch.setattr(gpu_check, "CUDA_INTERVAL_S", 0.1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def install_driver(machine: Path, *gpus: str, exit_code: int = 0) -> None:
    program = machine / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{gpu}'\n" for gpu in gpus) + f"exit {exit_code}\n")
    program.chmod(0o755)


def install_cuda(machine: Path, gpus: int, init: str = "return 0;") -> None:
    """Compile a driver library whose cuInit has this body."""
    code = "#include <fcntl.h>\n#include <unistd.h>\n"
    code += f"int cuInit(unsigned flags) {{ {init} }}\n"
    code += f"int cuDeviceGetCount(int *count) {{ *count = {gpus}; return 0; }}\n"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", machine / "libcuda.so.1"]
    subprocess.run(command, input=code, text=True, check=True)


def problem(instance_type: InstanceType = P4D) -> str:
    """Return what the check says about the machine."""
    with pytest.raises(UserError) as caught:
        gpu_check.check(instance_type)
    before, _, found = str(caught.value).partition(": ")
    assert before == f"this {instance_type.name} is not fit for work"
    return found


@pytest.mark.parametrize("gpus", sorted({one.gpus for one in INSTANCE_TYPES.values()}))
def test_a_sound_machine_passes(machine: Path, gpus: int) -> None:
    install_driver(machine, *[SOUND] * gpus)
    install_cuda(machine, gpus)
    gpu_check.check(next(one for one in INSTANCE_TYPES.values() if one.gpus == gpus))


def test_gpus_without_error_correction_pass(machine: Path) -> None:
    install_driver(machine, *["1000.1, [N/A]"] * 8)
    install_cuda(machine, 8)
    gpu_check.check(P4D)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([SOUND] * 7, "it has 7 of 8 GPUs"),
        ([SOUND] * 7 + ["Unable to determine the device handle for GPU7"], "it has 7 of 8 GPUs"),
        ([SOUND] * 7 + ["580.95.05, 3"], "GPU 7 has 3 uncorrectable memory errors"),
        (["570.195.03, 0"] * 8, "the image's NVIDIA driver is 570.195.03, but CUDA 13 needs 580 or later"),
    ],
)
def test_a_broken_machine_is_named_with_what_is_broken(machine: Path, gpus: list[str], expected: str) -> None:
    install_driver(machine, *gpus)
    assert problem() == expected


def test_a_machine_without_a_working_driver_has_no_gpus(machine: Path) -> None:
    for prepare in (lambda: None, lambda: install_driver(machine, "No devices were found", exit_code=9)):
        prepare()
        assert problem() == "it has 0 of 8 GPUs"


def test_the_fabric_manager_may_start_late(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "CUDA_TIMEOUT_S", 60.0)
    install_driver(machine, *[SOUND] * 8)
    install_cuda(machine, 8, FAILS_ONCE)
    gpu_check.check(P4D)
    assert (machine / "asked").exists()


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("return 802;", "CUDA does not start (error 802)"),
        ("return 803;", "CUDA does not start (error 803)"),
        ("return 999;", "CUDA does not start (error 999)"),
        ("return 100;", "CUDA does not start (error 100)"),
        ("sleep(60); return 0;", "CUDA does not start within 3 s"),
        ("_exit(7);", "CUDA does not start: exit code 7"),
    ],
)
def test_a_machine_on_which_cuda_does_not_start_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch, init: str, expected: str
) -> None:
    """nvidia-smi finds all GPUs sound."""
    monkeypatch.setattr(gpu_check, "TIMEOUT_S", 3.0)
    install_driver(machine, *[SOUND] * 8)
    install_cuda(machine, 8, init)
    assert problem() == expected


def test_cuda_must_find_all_gpus(machine: Path) -> None:
    install_driver(machine, *[SOUND] * 8)
    install_cuda(machine, 7)
    assert problem() == "CUDA finds 7 of 8 GPUs"


def test_a_machine_without_cuda_is_refused(machine: Path) -> None:
    install_driver(machine, *[SOUND] * 8)
    (machine / "libcuda.so.1").write_text("")  # and not a library of this machine
    assert "CUDA does not start: OSError: " in problem()
    assert "libcuda.so.1" in problem()


def test_only_machines_with_gpus_are_checked(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = iter(["m6i.8xlarge", "p4d.24xlarge"])
    monkeypatch.setattr(metadata, "read", lambda path: next(types))
    gpu_check.main()
    with pytest.raises(SystemExit, match="is not fit for work: it has 0 of 8 GPUs"):
        gpu_check.main()


# ---------------------------------------------------------------- NVMe disks


class Mount:
    """A folder that becomes a mount when its event is set."""

    def __init__(self) -> None:
        self.mounted = threading.Event()
        self.is_mount = self.mounted.is_set

    def __str__(self) -> str:
        return "/opt/dlami/nvme"


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Mount:
    made = Mount()
    monkeypatch.setattr(nvme, "FOLDER", made)
    monkeypatch.setattr(nvme, "INTERVAL_S", 0.02)
    monkeypatch.setattr(metadata, "read", lambda path: "p4d.24xlarge")
    return made


def test_the_setup_waits_for_a_late_mount(mount: Mount) -> None:
    threading.Timer(0.2, mount.mounted.set).start()
    started = time.monotonic()
    nvme.main()
    assert mount.is_mount()
    assert time.monotonic() - started > 0.1


def test_a_machine_whose_nvme_disks_are_never_mounted_is_refused(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "TIMEOUT_S", 0.1)
    with pytest.raises(SystemExit, match=r"its NVMe disks are not mounted at /opt"):
        nvme.main()


@pytest.mark.parametrize("name", ["m6i.8xlarge", "x99.metal"])
def test_a_type_without_nvme_disks_does_not_wait(mount: Mount, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(metadata, "read", lambda path: name)
    nvme.main()
