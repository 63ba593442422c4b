"""Check AWS's quotas: compare what the cluster may need with what is free within each quota."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from raymill import settings
from raymill.aws import aws_errors, quotas
from raymill.aws.doctor.account import Account, alternatives, retry
from raymill.aws.quotas import QUOTAS, Granted, Quota
from raymill.common.cluster_file import NodeType
from raymill.doctor import Finding, judge
from raymill.ray_support.aws_sections import NetworkSection

VPCS = "L-F678F1CE"
"""Code of the quota for VPCs in a region."""
GP3_STORAGE = "L-7A658B76"
"""Code of EBS's quota for all gp3 disks together, in TiB."""
Unknown = dict[str, list[str]]
"""The codes of the quotas that AWS does not tell, by its reason."""


class Use(NamedTuple):
    """How much of a quota the cluster needs, and how much it can have. All numbers are vCPUs."""

    quota: Quota
    name: str
    """AWS's name of the quota."""
    needed: int
    granted: float
    used: int
    """By instances that do not belong to this cluster."""
    blocked: list[NodeType]
    """Node types of which not even one instance can start."""


def check(account: Account) -> Iterator[Finding]:
    """Check every quota that applies to a node type of the cluster, to its disks or to its VPC.

    A quota that is too small for a GPU instance is an error only if no other market or type can do the same work. If
    AWS does not tell a quota, such as one that it has renamed, the others are still checked.
    """
    unknown: Unknown = {}
    uses = list(_uses(account, unknown))
    blocked = {worker.name for use in uses for worker in use.blocked}
    for use in uses:
        others = [
            {f"{one.instance_type} {one.market}" for one in alternatives(account, worker) if one.name not in blocked}
            for worker in use.blocked
        ]
        remaining = ", ".join(sorted(set().union(*others)))
        yield judge(
            use.needed <= use.granted - use.used,
            f"{use.name} ({use.quota.code}): {use.needed} vCPUs needed, {use.granted:g} granted, {use.used} used by "
            "other instances",
            (f"Until you have more, only {remaining} instances can start. " if remaining else "")
            + _request(account, "ec2", use.quota.code, use.needed + use.used),
            "warning" if all(others) else "error",
        )
    yield from _check_disks(account, unknown)
    if not settings.load(NetworkSection, "network", profile="cluster").subnets:
        yield from _check_vpcs(account, unknown)
    for reason, codes in unknown.items():
        yield Finding("warning", f"quotas {', '.join(codes)}: not checked, because AWS says: {reason}. {retry()}")


def _request(account: Account, service: str, code: str, value: int) -> str:
    """Return the sentence with which a remedy asks for a larger quota."""
    return (
        "Request an increase, which takes hours or days: aws service-quotas request-service-quota-increase "
        f"--service-code {service} --quota-code {code} --desired-value {value} --region {account.region}"
    )


def _granted(account: Account, code: str, unknown: Unknown, service: str = "ec2") -> Granted | None:
    """Ask AWS for a quota. If it does not tell the quota, note why and return None."""
    try:
        return quotas.granted(account, code, service)
    except ClientError as error:
        if aws_errors.missing_permission(error):
            raise
        unknown.setdefault(str(error), []).append(code)
        return None


def _uses(account: Account, unknown: Unknown) -> Iterator[Use]:
    planned = [account.head, *account.workers]
    others = list(_other_instances(account))
    types = {one.instance_type for one in planned} | {instance_type for instance_type, _ in others}
    described = account.client("ec2").describe_instance_types(InstanceTypes=sorted(types))["InstanceTypes"]
    vcpus = {one["InstanceType"]: one["VCpuInfo"]["DefaultVCpus"] for one in described}
    for quota in QUOTAS:
        counted = [one for one in planned if quota.counts(one.instance_type, one.market)]
        if counted and (granted := _granted(account, quota.code, unknown)):
            used = sum(vcpus[instance_type] for instance_type, market in others if quota.counts(instance_type, market))
            yield Use(
                quota,
                granted.name,
                _needed(account, counted, vcpus),
                granted.value,
                used,
                blocked=[one for one in counted if vcpus[one.instance_type] > granted.value - used],
            )


def _needed(account: Account, counted: list[NodeType], vcpus: dict[str, int]) -> int:
    """Return the vCPUs of the head, if counted, and of as many of the largest workers as the cluster may have."""
    workers = [one for one in counted if one != account.head]
    count = min(sum(one.max_workers for one in workers), account.max_workers)
    needed = count * max((vcpus[one.instance_type] for one in workers), default=0)
    return needed + (vcpus[account.head.instance_type] if account.head in counted else 0)


def _other_instances(account: Account) -> Iterator[tuple[str, str]]:
    """Yield the type and market of each running instance that a quota applies to, except instances of this cluster."""
    running = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    for page in account.client("ec2").get_paginator("describe_instances").paginate(Filters=running):
        for instance in (one for reservation in page["Reservations"] for one in reservation["Instances"]):
            found = instance["InstanceType"], instance.get("InstanceLifecycle") or "on-demand"
            if not _is_own(account, instance) and quotas.of(*found):
                yield found


def _check_disks(account: Account, unknown: Unknown) -> Iterator[Finding]:
    """Check the quota for the size of all gp3 disks. Beyond it, EC2 accepts a launch and then ends the instance.

    https://docs.aws.amazon.com/ebs/latest/userguide/ebs-resource-quotas.html
    """
    head, largest = _gp3_gib(account.head), max(map(_gp3_gib, account.workers), default=0)
    needed = head + account.max_workers * largest
    if needed and (granted := _granted(account, GP3_STORAGE, unknown, "ebs")):
        used = sum(volume["Size"] for volume in _other_gp3_volumes(account))
        free = 1024 * granted.value - used
        yield judge(
            needed <= free,
            f"{granted.name} ({GP3_STORAGE}): {needed / 1024:.1f} TiB needed, {granted.value:g} granted, "
            f"{used / 1024:.1f} used by other disks",
            _request(account, "ebs", GP3_STORAGE, math.ceil((needed + used) / 1024)),
            "warning" if head + largest <= free else "error",
        )


def _gp3_gib(node_type: NodeType) -> int:
    """Return the size of an instance's gp3 disks."""
    disks = [one.get("Ebs", {}) for one in node_type.node_config.get("BlockDeviceMappings", [])]
    return sum(disk.get("VolumeSize", 0) for disk in disks if disk.get("VolumeType") == "gp3")


def _other_gp3_volumes(account: Account) -> Iterator[dict[str, Any]]:
    gp3 = [{"Name": "volume-type", "Values": ["gp3"]}]
    for page in account.client("ec2").get_paginator("describe_volumes").paginate(Filters=gp3):
        yield from (one for one in page["Volumes"] if not _is_own(account, one))


def _is_own(account: Account, described: dict[str, Any]) -> bool:
    """Return whether a resource belongs to this cluster."""
    return {"Key": "ray-project", "Value": account.slug} in described.get("Tags", [])


def _check_vpcs(account: Account, unknown: Unknown) -> Iterator[Finding]:
    """Check that the stack may make one more VPC, unless it has already made it."""
    vpcs = account.client("ec2").describe_vpcs()["Vpcs"]
    if granted := _granted(account, VPCS, unknown, "vpc"):
        yield judge(
            len(vpcs) < granted.value or any(_is_own(account, one) for one in vpcs),
            f"{len(vpcs)} of at most {granted.value:g} VPCs in {account.region}",
            "The stack needs one more. Delete one, or set subnets in [cluster.network] of settings.toml. "
            + _request(account, "vpc", VPCS, len(vpcs) + 1),
        )
