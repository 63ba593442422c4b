"""Test the check that a worker must pass before it takes work."""

import os
from pathlib import Path

import pytest

import settings
from cluster.node import gpu_check, metadata
from instance_types import INSTANCE_TYPES, InstanceType

P4D = INSTANCE_TYPES["p4d.24xlarge"]
SOUND = "580.95.05, 0"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder whose nvidia-smi runs. NVMe disks are mounted."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(gpu_check, "NVME", Path("/"))
    return tmp_path


def install_driver(machine: Path, *gpus: str, exit_code: int = 0) -> None:
    program = machine / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{gpu}'\n" for gpu in gpus) + f"exit {exit_code}\n")
    program.chmod(0o755)


@pytest.mark.parametrize("instance_type", INSTANCE_TYPES.values(), ids=str)
def test_a_sound_machine_passes(machine: Path, instance_type: InstanceType) -> None:
    install_driver(machine, *[SOUND] * instance_type.gpus)
    gpu_check.check(instance_type)


def test_gpus_without_error_correction_pass(machine: Path) -> None:
    install_driver(machine, *["1000.1, [N/A]"] * 8)
    gpu_check.check(P4D)


@pytest.mark.parametrize(
    ("gpus", "problem"),
    [
        ([SOUND] * 7, "it has 7 of 8 GPUs"),
        ([SOUND] * 7 + ["Unable to determine the device handle for GPU7"], "it has 7 of 8 GPUs"),
        ([SOUND] * 7 + ["580.95.05, 3"], "GPU 7 has 3 uncorrectable memory errors"),
        (["570.195.03, 0"] * 8, "the image's NVIDIA driver is 570.195.03, but CUDA 13 needs 580 or later"),
    ],
)
def test_a_broken_machine_is_named_with_what_is_broken(machine: Path, gpus: list[str], problem: str) -> None:
    install_driver(machine, *gpus)
    with pytest.raises(settings.UserError) as caught:
        gpu_check.check(P4D)
    assert str(caught.value) == f"this p4d.24xlarge is not fit for work: {problem}"


def test_a_machine_without_a_working_driver_has_no_gpus(machine: Path) -> None:
    for prepare in (lambda: None, lambda: install_driver(machine, "No devices were found", exit_code=9)):
        prepare()
        with pytest.raises(settings.UserError, match="it has 0 of 8 GPUs"):
            gpu_check.check(P4D)


def test_a_machine_without_its_nvme_disks_fails(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(machine, *[SOUND] * 8)
    monkeypatch.setattr(gpu_check, "NVME", machine)
    with pytest.raises(settings.UserError, match=f"its NVMe disks are not mounted at {machine}"):
        gpu_check.check(P4D)


def test_only_machines_with_gpus_are_checked(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = iter(["m6i.8xlarge", "p4d.24xlarge"])
    monkeypatch.setattr(metadata, "read", lambda path: next(types))
    gpu_check.main()
    with pytest.raises(SystemExit, match="is not fit for work: it has 0 of 8 GPUs"):
        gpu_check.main()
