"""Check EC2's quotas: compare the vCPUs that the cluster may need with the vCPUs that are free within each quota."""

from collections.abc import Iterator
from typing import NamedTuple

import settings
from cluster.aws import quotas, vpc
from cluster.aws.doctor.account import Account, alternatives
from cluster.aws.quotas import QUOTAS, Quota
from cluster.common.cluster_file import NodeType
from cluster.doctor import Finding, judge

VPCS = "L-F678F1CE"
"""Code of the quota for VPCs in a region."""


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
    """Check every quota that applies to a node type of the cluster.

    A quota that is too small for a GPU instance is an error only if no other market or type can do the same work.
    """
    uses = list(_uses(account))
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
            + "Request an increase, which takes hours or days: aws service-quotas request-service-quota-increase "
            f"--service-code ec2 --quota-code {use.quota.code} --desired-value {use.needed + use.used} "
            f"--region {account.region}",
            "warning" if all(others) else "error",
        )
    if not settings.load(vpc.NetworkSection, "network", profile="cluster").subnets:
        yield _check_vpcs(account)


def _uses(account: Account) -> Iterator[Use]:
    planned = [account.head, *account.workers]
    others = list(_other_instances(account))
    types = {one.instance_type for one in planned} | {instance_type for instance_type, _ in others}
    described = account.client("ec2").describe_instance_types(InstanceTypes=sorted(types))["InstanceTypes"]
    vcpus = {one["InstanceType"]: one["VCpuInfo"]["DefaultVCpus"] for one in described}
    for quota in QUOTAS:
        if counted := [one for one in planned if quota.counts(one.instance_type, one.market)]:
            granted = quotas.granted(account, quota)
            used = sum(vcpus[instance_type] for instance_type, market in others if quota.counts(instance_type, market))
            yield Use(
                quota,
                granted.name,
                _needed(account, counted, vcpus),
                granted.vcpus,
                used,
                blocked=[one for one in counted if vcpus[one.instance_type] > granted.vcpus - used],
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
            own = {"Key": "ray-project", "Value": account.slug} in instance.get("Tags", [])
            if not own and quotas.of(*found):
                yield found


def _check_vpcs(account: Account) -> Finding:
    """Check that the stack may make one more VPC, unless it has already made it."""
    vpcs = account.client("ec2").describe_vpcs()["Vpcs"]
    granted = account.client("service-quotas").get_service_quota(ServiceCode="vpc", QuotaCode=VPCS)["Quota"]["Value"]
    is_made = any({"Key": "ray-project", "Value": account.slug} in one.get("Tags", []) for one in vpcs)
    return judge(
        is_made or len(vpcs) < granted,
        f"{len(vpcs)} of at most {granted:g} VPCs in {account.region}",
        "The stack needs one more. Delete one, set subnets in [cluster.network] of settings.toml, or request an "
        "increase: aws service-quotas request-service-quota-increase --service-code vpc "
        f"--quota-code {VPCS} --desired-value {len(vpcs) + 1} --region {account.region}",
    )
