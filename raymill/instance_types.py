"""The GPU instance types of AWS that a cluster may have. To add one, add it here and nowhere else.

The question about the instance type, `inv plan`, `inv fit`, `inv doctor`, prices and the MFU of a run all use this
table. This module imports only the standard library, because the template reads it before a project exists.

Sources:
- instance types and their regions: EC2's DescribeInstanceTypes and DescribeInstanceTypeOfferings, which state the same
  as aws.amazon.com/ec2/instance-types. tests/integration/test_instance_types.py compares the table with moto's copy.
- bf16_flops: NVIDIA's data sheets. They state the peak with sparsity, except for A100; the dense peak is half of that.
- mib: `nvidia-smi`. It shows slightly less than EC2 states for H100 and H200, and more for A10G, L4 and L40S.
- quotas: docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
- highest prices: aws.amazon.com/ec2/pricing/on-demand. Each is about 1.7 times the price per GPU of the most expensive
  size in us-east-1, as it was before AWS lowered its prices in 2025, because sa-east-1 costs 1.7 times as much.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A model of GPU."""

    device: str
    """Name that the driver reports."""
    accelerator: str
    """Name that Ray derives from `device`."""
    mib: int
    """Memory that the driver reports (`nvidia-smi`), in MiB."""
    bf16_flops: float
    """Peak number of dense bf16 operations per second."""
    capability: int
    """Compute capability, times ten."""
    highest_price: float
    """Dollars per hour that no instance exceeds, divided by its GPUs. See `highest_price`."""

    @property
    def gib(self) -> float:
        """Memory in GiB."""
        return self.mib / 1024

    def __str__(self) -> str:
        return f"{self.accelerator} ({self.gib:.0f} GB)"


A10G = Gpu("NVIDIA A10G", "A10G", 23_028, 70e12, 86, 7.5)
L4 = Gpu("NVIDIA L4", "L4", 23_034, 121e12, 89, 6.5)
L40S = Gpu("NVIDIA L40S", "L40S", 46_068, 362e12, 89, 13)
A100_40 = Gpu("NVIDIA A100-SXM4-40GB", "A100", 40_960, 312e12, 80, 7)
A100_80 = Gpu("NVIDIA A100-SXM4-80GB", "A100", 81_920, 312e12, 80, 8)
H100 = Gpu("NVIDIA H100 80GB HBM3", "H100", 81_559, 989e12, 90, 19)
H200 = Gpu("NVIDIA H200", "H200", 143_771, 989e12, 90, 16)
B200 = Gpu("NVIDIA B200", "B200", 183_359, 2250e12, 100, 22)


@dataclass(frozen=True)
class Family:
    """What all sizes of an instance family share."""

    regions: tuple[str, ...]
    """Regions that offer the family."""
    on_demand_quota: str
    """Code of the quota on vCPUs of running on-demand instances."""
    spot_quota: str
    """The same for spot instances. Empty: AWS documents none."""


P_QUOTA, P2_TO_P4_SPOT_QUOTA, P5_SPOT_QUOTA = "L-417A185B", "L-7212CCBC", "L-C4BD4855"
G_QUOTA, G_SPOT_QUOTA = "L-DB2E81BA", "L-3819A6DF"
US = ("us-east-1", "us-east-2", "us-west-2")
P4D = Family(
    (
        *(*US, "ca-central-1", "sa-east-1", "eu-central-1", "eu-north-1", "eu-west-1", "eu-west-2"),
        *("ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-2"),
    ),
    P_QUOTA,
    P2_TO_P4_SPOT_QUOTA,
)
P4DE = Family(
    ("us-east-1", "us-west-2", "eu-central-1", "ap-northeast-1", "ap-southeast-1", "il-central-1"),
    P_QUOTA,
    P2_TO_P4_SPOT_QUOTA,
)
P5 = Family(
    (
        *(*US, "us-west-1", "ca-central-1", "sa-east-1", "eu-north-1", "eu-west-2", "ap-northeast-1"),
        *("ap-northeast-2", "ap-south-1", "ap-southeast-2", "ap-southeast-3"),
    ),
    P_QUOTA,
    P5_SPOT_QUOTA,
)
P5E = Family(
    ("us-east-2", "us-west-2", "sa-east-1", "eu-north-1", "eu-west-2", "ap-southeast-2", "ap-southeast-3"),
    P_QUOTA,
    P5_SPOT_QUOTA,
)
P5EN = Family(
    (
        *(*US, "us-west-1", "eu-north-1", "eu-south-2", "ap-northeast-1", "ap-northeast-2", "ap-south-1"),
        *("ap-southeast-3", "me-central-1"),
    ),
    P_QUOTA,
    P5_SPOT_QUOTA,
)
P6_B200 = Family((*US, "eu-north-1", "eu-west-3", "ap-south-1", "ap-south-2"), P_QUOTA, "")
G5 = Family(
    (
        *(*US, "ca-central-1", "sa-east-1", "eu-central-1", "eu-north-1", "eu-south-2", "eu-west-1", "eu-west-2"),
        *("eu-west-3", "ap-east-1", "ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-2"),
        *("ap-southeast-3", "il-central-1", "me-central-1"),
    ),
    G_QUOTA,
    G_SPOT_QUOTA,
)
G6 = Family(
    (
        *(*US, "ca-central-1", "sa-east-1", "eu-central-1", "eu-central-2", "eu-north-1", "eu-south-2", "eu-west-2"),
        *("eu-west-3", "ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-south-2", "ap-southeast-2"),
        *("ap-southeast-5", "me-central-1"),
    ),
    G_QUOTA,
    G_SPOT_QUOTA,
)
G6E = Family(
    (
        *(*US, "eu-central-1", "eu-north-1", "eu-south-2", "ap-northeast-1", "ap-northeast-2", "ap-northeast-3"),
        *("ap-south-1", "ap-south-2", "me-central-1"),
    ),
    G_QUOTA,
    G_SPOT_QUOTA,
)


@dataclass(frozen=True)
class InstanceType:
    """A GPU instance type."""

    name: str
    family: Family
    gpu: Gpu
    gpus: int
    """Number of GPUs."""
    vcpus: int
    memory_gib: int
    """Main memory."""
    nvme_gb: int
    """Size of the local NVMe disks together."""
    gbit_per_s: float
    """Sustained network bandwidth. Small types also have bursts."""
    efa_cards: int
    """Network cards that support EFA. 0: none does."""

    def instances(self, gpus: int) -> int:
        """Return the number of instances that have this many GPUs."""
        return math.ceil(gpus / self.gpus)

    def __str__(self) -> str:
        return f"{self.name} ({self.gpus} × {self.gpu.accelerator}, {self.gpu.gib:.0f} GB each)"


INSTANCE_TYPES = {
    one.name: one
    for one in (
        # name, family, GPU, GPUs, vCPUs, GiB of main memory, GB of NVMe, Gbit/s, EFA cards
        InstanceType("p4d.24xlarge", P4D, A100_40, 8, 96, 1152, 8000, 400, 4),
        InstanceType("p4de.24xlarge", P4DE, A100_80, 8, 96, 1152, 8000, 400, 4),
        InstanceType("p5.48xlarge", P5, H100, 8, 192, 2048, 30400, 3200, 32),
        InstanceType("p5e.48xlarge", P5E, H200, 8, 192, 2048, 30400, 3200, 32),
        InstanceType("p5en.48xlarge", P5EN, H200, 8, 192, 2048, 30400, 3200, 16),
        InstanceType("p6-b200.48xlarge", P6_B200, B200, 8, 192, 2048, 30400, 3200, 8),
        InstanceType("g5.xlarge", G5, A10G, 1, 4, 16, 250, 2.5, 0),
        InstanceType("g5.2xlarge", G5, A10G, 1, 8, 32, 450, 5, 0),
        InstanceType("g5.4xlarge", G5, A10G, 1, 16, 64, 600, 10, 0),
        InstanceType("g5.8xlarge", G5, A10G, 1, 32, 128, 900, 25, 1),
        InstanceType("g5.16xlarge", G5, A10G, 1, 64, 256, 1900, 25, 1),
        InstanceType("g5.12xlarge", G5, A10G, 4, 48, 192, 3800, 40, 1),
        InstanceType("g5.24xlarge", G5, A10G, 4, 96, 384, 3800, 50, 1),
        InstanceType("g5.48xlarge", G5, A10G, 8, 192, 768, 7600, 100, 1),
        InstanceType("g6.xlarge", G6, L4, 1, 4, 16, 250, 2.5, 0),
        InstanceType("g6.2xlarge", G6, L4, 1, 8, 32, 450, 5, 0),
        InstanceType("g6.4xlarge", G6, L4, 1, 16, 64, 600, 10, 0),
        InstanceType("g6.8xlarge", G6, L4, 1, 32, 128, 900, 25, 1),
        InstanceType("g6.16xlarge", G6, L4, 1, 64, 256, 1880, 25, 1),
        InstanceType("g6.12xlarge", G6, L4, 4, 48, 192, 3760, 40, 1),
        InstanceType("g6.24xlarge", G6, L4, 4, 96, 384, 3760, 50, 1),
        InstanceType("g6.48xlarge", G6, L4, 8, 192, 768, 7520, 100, 1),
        InstanceType("g6e.xlarge", G6E, L40S, 1, 4, 32, 250, 2.5, 0),
        InstanceType("g6e.2xlarge", G6E, L40S, 1, 8, 64, 450, 5, 0),
        InstanceType("g6e.4xlarge", G6E, L40S, 1, 16, 128, 600, 20, 0),
        InstanceType("g6e.8xlarge", G6E, L40S, 1, 32, 256, 900, 25, 1),
        InstanceType("g6e.16xlarge", G6E, L40S, 1, 64, 512, 1900, 35, 1),
        InstanceType("g6e.12xlarge", G6E, L40S, 4, 48, 384, 3800, 100, 1),
        InstanceType("g6e.24xlarge", G6E, L40S, 4, 96, 768, 3800, 200, 2),
        InstanceType("g6e.48xlarge", G6E, L40S, 8, 192, 1536, 7600, 400, 4),
    )
}
"""Maps the name of an instance type to its data. Among types with the same GPU, the smaller ones come first."""


def gpu_of(name: str) -> Gpu | None:
    """Return the GPU for which the driver reports this name, or None if it is not in the table."""
    return next((one.gpu for one in INSTANCE_TYPES.values() if one.gpu.device == name), None)


CPU_HIGHEST_PRICES = {"m6i.2xlarge": 1.0, "m6i.8xlarge": 3.0}
"""The same as `Gpu.highest_price` for the types without GPUs in cluster.yaml, by instance."""


def highest_price(name: str) -> float:
    """Return the dollars per hour that count for an instance while AWS does not name its price.

    Such a number must never be too low, because the limit in dollars depends on it. A type that is not in the tables
    counts as much as the most expensive one.
    """
    prices = {one.name: one.gpus * one.gpu.highest_price for one in INSTANCE_TYPES.values()} | CPU_HIGHEST_PRICES
    return prices.get(name, max(prices.values()))
