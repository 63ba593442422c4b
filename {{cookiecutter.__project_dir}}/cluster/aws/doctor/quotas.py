"""Check EC2's quotas: compare the vCPUs that the cluster may need with the vCPUs that are free within each quota."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import settings
from cluster.aws import vpc
from cluster.aws.doctor.account import Account
from cluster.common.cluster_file import NodeType
from cluster.doctor import Finding, judge


class Quota(NamedTuple):
    """A limit on the vCPUs of instances that run at the same time."""

    code: str
    types: str
    """Regular expression that matches the beginning of the instance types that the quota applies to."""
    market: str

    def counts(self, instance_type: str, market: str) -> bool:
        return self.market == market and re.match(self.types, instance_type) is not None


QUOTAS = (
    Quota("L-417A185B", r"p\d", "on-demand"),
    Quota("L-7212CCBC", r"p[234]", "spot"),  # later P types have their own spot quotas
    Quota("L-1216C47A", r"[acdhimrtz]\d", "on-demand"),
    Quota("L-34B43A08", r"[acdhimrtz]\d", "spot"),
)


VPCS = "L-F678F1CE"
"""Code of the quota for VPCs in a region."""


def check(account: Account) -> Iterator[Finding]:
    """Check every quota that applies to a node type of cluster.yaml."""
    planned = [account.head, *account.workers]
    others = list(_other_instances(account))
    types = {one.instance_type for one in planned} | {instance_type for instance_type, _ in others}
    described = account.client("ec2").describe_instance_types(InstanceTypes=sorted(types))["InstanceTypes"]
    vcpus = {one["InstanceType"]: one["VCpuInfo"]["DefaultVCpus"] for one in described}
    for quota in QUOTAS:
        used = sum(vcpus[instance_type] for instance_type, market in others if quota.counts(instance_type, market))
        if counted := [one for one in planned if quota.counts(one.instance_type, one.market)]:
            yield _check_quota(account, quota, counted, vcpus, used)
    if not settings.load(vpc.NetworkSection, "network", profile="cluster").subnets:
        yield _check_vpcs(account)


def _other_instances(account: Account) -> Iterator[tuple[str, str]]:
    """Yield the type and market of each running instance that a quota applies to, except instances of this cluster."""
    running = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    for page in account.client("ec2").get_paginator("describe_instances").paginate(Filters=running):
        for instance in (one for reservation in page["Reservations"] for one in reservation["Instances"]):
            found = instance["InstanceType"], instance.get("InstanceLifecycle") or "on-demand"
            own = {"Key": "ray-project", "Value": account.slug} in instance.get("Tags", [])
            if not own and any(quota.counts(*found) for quota in QUOTAS):
                yield found


def _check_quota(account: Account, quota: Quota, counted: list[NodeType], vcpus: dict[str, int], used: int) -> Finding:
    workers = [one for one in counted if one != account.head]
    count = min(sum(one.max_workers for one in workers), account.max_workers)
    needed = count * max((vcpus[one.instance_type] for one in workers), default=0)
    needed += vcpus[account.head.instance_type] if account.head in counted else 0
    granted = account.client("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=quota.code)["Quota"]
    free = granted["Value"] - used
    has_room_for_one = free >= max(vcpus[one.instance_type] for one in counted)
    return judge(
        needed <= free,
        f"{granted['QuotaName']} ({quota.code}): {needed} vCPUs needed, {granted['Value']:g} granted, {used} used by "
        "other instances",
        "Request an increase, which takes hours or days: aws service-quotas request-service-quota-increase "
        f"--service-code ec2 --quota-code {quota.code} --desired-value {needed + used} --region {account.region}",
        "warning" if has_room_for_one else "error",
    )


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
