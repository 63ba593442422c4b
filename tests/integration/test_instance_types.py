"""Compare the table of instance types with EC2's answers, of which moto has a copy, and with Ray's names of GPUs."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import moto.ec2
import pytest
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray.util.accelerators import accelerators

from raymill import instance_types
from raymill.instance_types import INSTANCE_TYPES, InstanceType

FOLDER = Path(moto.ec2.__file__).parent / "resources"
TYPES = [pytest.param(one, id=name) for name, one in INSTANCE_TYPES.items()]


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """Return EC2's descriptions of all instance types, by name."""
    return json.loads(gzip.decompress((FOLDER / "instance_types.json.gz").read_bytes()))


@pytest.fixture(scope="module")
def regions() -> dict[str, set[str]]:
    """Return the regions that offer each instance type."""
    found: dict[str, set[str]] = {}
    for file in (FOLDER / "instance_type_offerings" / "region").iterdir():
        for offer in json.loads(gzip.decompress(file.read_bytes())):
            found.setdefault(offer["InstanceType"], set()).add(file.name.partition(".")[0])
    return found


@pytest.mark.parametrize("one", TYPES)
def test_the_instance_types_are_those_of_ec2(one: InstanceType, described: dict[str, Any]) -> None:
    ec2 = described[one.name]
    (gpus,), network = ec2["GpuInfo"]["Gpus"], ec2["NetworkInfo"]
    assert one.vcpus == ec2["VCpuInfo"]["DefaultVCpus"]
    assert one.memory_gib == ec2["MemoryInfo"]["SizeInMiB"] / 1024
    assert one.nvme_gb == ec2["InstanceStorageInfo"]["TotalSizeInGB"]
    assert (one.gpus, one.gpu.accelerator) == (gpus["Count"], gpus["Name"])
    assert one.gpu.mib == pytest.approx(gpus["MemoryInfo"]["SizeInMiB"], rel=0.01)
    assert one.efa_cards == network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    assert one.gbit_per_s == _gbit_per_s(network)


def _gbit_per_s(network: dict[str, Any]) -> float:
    """Return the sustained bandwidth. EC2 describes it as "4x 100 Gigabit" or "25 Gigabit", or names only the burst."""
    performance = network["NetworkPerformance"]
    if performance.startswith("Up to"):
        return network["NetworkCards"][0]["BaselineBandwidthInGbps"]
    cards, gigabit = re.fullmatch(r"(?:(\d+)x )?(\d+) Gigabit", performance).groups()  # type: ignore[union-attr]
    return int(cards or 1) * int(gigabit)


@pytest.mark.parametrize("one", TYPES)
def test_the_regions_are_those_that_offer_the_type(one: InstanceType, regions: dict[str, set[str]]) -> None:
    assert len(set(one.family.regions)) == len(one.family.regions)
    assert set(one.family.regions) == regions[one.name]


@pytest.mark.parametrize("one", TYPES)
def test_ray_derives_the_accelerator_from_the_name_of_the_device(one: InstanceType) -> None:
    assert NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(one.gpu.device) == one.gpu.accelerator
    assert one.gpu.accelerator in vars(accelerators).values()


def test_among_types_with_the_same_gpu_smaller_ones_come_first() -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    for one in INSTANCE_TYPES.values():
        seen.setdefault(one.gpu.device, []).append((one.gpus, one.vcpus))
    assert all(sizes == sorted(sizes) for sizes in seen.values())


def test_gpus_are_found_by_the_name_of_the_device() -> None:
    assert instance_types.gpu_of("NVIDIA A100-SXM4-80GB") == instance_types.A100_80
    assert instance_types.gpu_of("NVIDIA H100 PCIe") is None


def test_instances_are_rounded_up() -> None:
    assert [INSTANCE_TYPES["g6.12xlarge"].instances(gpus) for gpus in (1, 4, 5)] == [1, 1, 2]
