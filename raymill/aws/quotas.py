"""AWS's quotas, mainly EC2's: limits on the vCPUs of instances of the same kind that run at the same time."""

import re
from typing import NamedTuple

import botocore.exceptions

from raymill.common.cluster_file import ClusterFile
from raymill.instance_types import G_QUOTA, G_SPOT_QUOTA, INSTANCE_TYPES, P2_TO_P4_SPOT_QUOTA, P5_SPOT_QUOTA, P_QUOTA


class Quota(NamedTuple):
    """A limit on the vCPUs of instances that run at the same time."""

    code: str
    types: str
    """Regular expression that matches the beginning of the instance types that the quota applies to."""
    market: str

    def counts(self, instance_type: str, market: str) -> bool:
        return self.market == market and re.match(self.types, instance_type) is not None


class Granted(NamedTuple):
    """What AWS grants the account in this region."""

    name: str
    value: float
    """vCPUs, unless the quota counts something else."""


QUOTAS = (
    Quota(P_QUOTA, r"p\d", "on-demand"),
    Quota(P2_TO_P4_SPOT_QUOTA, r"p[234]", "spot"),
    Quota(P5_SPOT_QUOTA, r"p5", "spot"),
    Quota(G_QUOTA, r"(g|vt)\d", "on-demand"),
    Quota(G_SPOT_QUOTA, r"(g|vt)\d", "spot"),
    Quota("L-1216C47A", r"[acdhimrtz]\d", "on-demand"),
    Quota("L-34B43A08", r"[acdhimrtz]\d", "spot"),
)


def of(instance_type: str, market: str) -> Quota | None:
    """Return the quota that applies, or None if none is known, as for a Capacity Block."""
    return next((quota for quota in QUOTAS if quota.counts(instance_type, market)), None)


def granted(file: ClusterFile, code: str, service: str = "ec2") -> Granted:
    """Ask AWS for a quota."""
    answer = file.client("service-quotas").get_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]
    return Granted(answer["QuotaName"], answer["Value"])


def too_small(file: ClusterFile, wanted: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return those of the wanted GPU instance types and markets whose quota does not allow even one instance.

    Without permission to read a quota, or if AWS does not answer, its size is unknown, and it counts as large enough.
    """
    found: set[tuple[str, str]] = set()
    for quota in QUOTAS:
        counted = {(name, market) for name, market in wanted if quota.counts(name, market)}
        if counted:
            try:
                vcpus = granted(file, quota.code).value
            except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError):
                continue
            found |= {one for one in counted if INSTANCE_TYPES[one[0]].vcpus > vcpus}
    return found
