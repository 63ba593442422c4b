"""Check whose the cluster is."""

from collections.abc import Iterator

from raymill.aws import ownership
from raymill.aws.doctor.account import Account
from raymill.doctor import Finding, judge


def check(account: Account) -> Iterator[Finding]:
    """Report the owner of the cluster, if there is a cluster."""
    if found := ownership.find(account):
        remedy = f"inv up and inv down will ask before they use it. For a cluster of your own, {ownership.OTHER_NAME}"
        yield judge(ownership.is_mine(account, found), ownership.describe(account, found), remedy, "warning")
