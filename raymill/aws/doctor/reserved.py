"""Check the capacity reservation that [cluster.capacity] names, and name others that cost money."""

import datetime
import math
from collections.abc import Iterator

from raymill import settings
from raymill.aws import reservation
from raymill.aws.doctor.account import Account
from raymill.aws.reservation import Reservation
from raymill.common import instances, limits
from raymill.common.cluster_file import target
from raymill.doctor import Finding, judge
from raymill.ray_support.aws_sections import NetworkSection


def check(account: Account) -> Iterator[Finding]:
    """Check that the reservation can be used, and that neither max_workers nor the limit in hours cuts it short.

    Another reservation of the project costs money, and this cluster does not use it.

    Raises:
        UserError: it does not exist, it has ended, or no subnet is in its zone.
    """
    named = reservation.load_section().reservation
    for one in reservation.paid(account):
        if one.id != named:
            text = "[cluster.capacity] of settings.toml does not name it, so the cluster does not use it"
            yield Finding("warning", f"{reservation.cost(account, one)}. {text}")
        elif not one.is_block:
            yield Finding("ok", reservation.cost(account, one))
    reserved = reservation.require(account)
    if reserved is None:
        return
    remedy = f"Until it starts, inv up starts nothing. To wait for it, run: inv up --target {target()} --wait"
    yield judge(reserved.has_started, reserved.summary, remedy, "warning")
    reservation.stack_parameters(account, settings.load(NetworkSection, "network", profile="cluster"))
    if reserved.count > account.max_workers:
        text = (
            f"max_workers is {account.max_workers}, so {reserved.count - account.max_workers} reserved instances idle"
        )
        yield Finding("warning", f"{text}. Raise max_workers in cluster/cluster.yaml")
    if reserved.is_block:
        yield from _check_hours(account, reserved)


def _check_hours(account: Account, reserved: Reservation) -> Iterator[Finding]:
    """Warn if the limit in hours ends the cluster before AWS ends the block's instances."""
    hours = limits.load().hours
    head = instances.head(account)
    launch = head.launched if head else max(datetime.datetime.now(datetime.UTC), reserved.start or reserved.cleanup)
    limit = launch + datetime.timedelta(hours=hours)
    if limit < reserved.cleanup:
        needed = math.ceil((reserved.cleanup - launch) / datetime.timedelta(hours=1))
        yield Finding(
            "warning",
            f"the limit of {hours:g} hours ends the cluster at {reservation.local(limit)}, but the {reserved.name} "
            f"ends at {reservation.local(reserved.end)}. Set hours = {needed} in [cluster.limits] of settings.toml",
        )
