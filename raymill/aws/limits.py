"""Show and change the limits of a running cluster. `inv limits` runs this.

The watchdog on the head rereads its copy of settings.toml, so a change of the limits ends no jobs.
"""

import datetime
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from raymill import settings, settings_file
from raymill.aws import consent, guard, head, ssh
from raymill.aws.reservation import local
from raymill.common import instances, limits, prices
from raymill.common.cluster_file import ClusterFile, target
from raymill.common.limits import LimitsSection
from raymill.console import cell
from raymill.errors import UserError

COPY_ON_HEAD = "~/project/settings.toml"
"""The head's copy of settings.toml, as in `file_mounts` of cluster.yaml."""
TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How much of its limits a running cluster has used."""

    limits: LimitsSection
    hours: float
    dollars: float
    dollars_per_hour: float
    idle_hours: float
    """Time since somebody used the cluster."""
    price_warning: str = ""
    """What the watchdog says about prices that it does not know."""

    def most_dollars(self, wanted: LimitsSection, dollars_per_hour: float) -> float:
        """Return the most that the cluster can have cost when it reaches one of the wanted limits."""
        return min(wanted.dollars, self.dollars + (wanted.hours - self.hours) * dollars_per_hour)


def show(file: ClusterFile, console: Console) -> None:
    """Print the limits, how much of them is used, and the time that is left."""
    usage = _read(ssh.find_head(file))
    table = Table(title="Limits", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("", "limit", "used", "left", "time left"):
        table.add_column(column, header_style="dim")
    hours, dollars = usage.limits.hours - usage.hours, usage.limits.dollars - usage.dollars
    end = local(datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours))
    table.add_row("hours", f"{usage.limits.hours:g}", f"{usage.hours:.1f}", f"{hours:.1f}", f"until {end}")
    rate = usage.dollars_per_hour
    lasts = f"{dollars / rate:.1f} hours at the current {rate:.2f} dollars per hour" if rate else ""
    table.add_row("dollars", f"{usage.limits.dollars:g}", f"{usage.dollars:.2f}", f"{dollars:.2f}", lasts)
    idle = usage.limits.idle_hours
    limit, left = (f"{idle:g}", f"{idle - usage.idle_hours:.1f}") if idle else ("unlimited", "")
    table.add_row(
        "idle hours", limit, f"{usage.idle_hours:.1f}", left, "until a job or a request comes" if idle else ""
    )
    console.print(table)
    if usage.price_warning:
        console.print(cell(usage.price_warning), highlight=False)


def change(file: ClusterFile, given: Mapping[str, str], yes: bool) -> None:
    """Change the given limits on the running cluster and in settings.toml. Ask before raising hours or dollars.

    Raises:
        UserError: no cluster runs, a limit is not a valid number or already used up, or the user does not
            agree.
    """
    running_head = ssh.find_head(file)
    usage = _read(running_head)
    try:
        wanted = LimitsSection.model_validate({**usage.limits.model_dump(), **given})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{_option(str(first['loc'][0]))} is {first['input']!r}. {first['msg']}") from None
    options = " ".join(f"{_option(name)} {value}" for name, value in given.items())
    _agree(file, usage, wanted, yes, f"inv limits --target {target()} {options}")
    values = {name: int(value) if value == int(value) else value for name, value in wanted.model_dump().items()}
    settings_file.write({"cluster.limits": values}, settings.FILE)
    _apply(file, running_head, wanted)
    print(f"the limits are now {wanted}, also in settings.toml for the next cluster. Running jobs continue")


def follow_settings(file: ClusterFile, yes: bool) -> None:
    """Give the running cluster the limits in settings.toml. Ask before raising one.

    Raises:
        UserError: a limit is already used up, or the user does not agree.
    """
    wanted, running_head = limits.load(), ssh.find_head(file)
    usage = _read(running_head)
    if wanted != usage.limits:
        _agree(file, usage, wanted, yes, f"inv up --target {target()}")
        _apply(file, running_head, wanted)
        print(f"the limits are now {wanted}, as in settings.toml. Running jobs continue")


def _agree(file: ClusterFile, usage: Usage, wanted: LimitsSection, yes: bool, command: str) -> None:
    for name, used in (("hours", usage.hours), ("dollars", usage.dollars), ("idle_hours", usage.idle_hours)):
        if 0 < getattr(wanted, name) <= used:  # 0: unlimited idle hours
            raise UserError(
                f"the cluster has used {used:.2f} {name.replace('_', ' ')}, so a limit of {getattr(wanted, name):g} "
                f"would end it and all jobs now. To end it, run: inv down --target {target()}"
            )
    if wanted.hours <= usage.limits.hours and wanted.dollars <= usage.limits.dollars:
        return
    most = usage.most_dollars(wanted, prices.ask(file).maximum)
    print(f"the limits change from {usage.limits} to {wanted}")
    print(f"the cluster then costs at most {most:.2f} dollars, of which {usage.dollars:.2f} are spent")
    consent.ask("raise the limits?", yes, command)


def _read(running_head: ssh.SshHead) -> Usage:
    state = head.read_status(running_head)["watchdog"]
    if not state["runs"] or "limits" not in state:  # without limits, it is older than this code
        raise UserError(f"the watchdog is not running on the head. Run: inv up --target {target()}")
    used = {name: state[name] for name in ("hours", "dollars", "dollars_per_hour", "idle_hours")}
    return Usage(limits=LimitsSection(**state["limits"]), price_warning=state.get("price_warning", ""), **used)


def _option(limit: str) -> str:
    return f"--{limit.replace('_', '-')}"


def _apply(file: ClusterFile, running_head: ssh.SshHead, wanted: LimitsSection) -> None:
    """Move the guard, replace the head's copy of settings.toml, and wait until the watchdog has read the limits."""
    if instance := instances.head(file):
        guard.move(file, instance.launched, wanted.hours)  # first, because it must not come before a later end
    new = f"{COPY_ON_HEAD}.new"
    running_head.run(f"cat > {new} && mv {new} {COPY_ON_HEAD}", settings.FILE.read_text(encoding="utf-8"))
    deadline = time.monotonic() + TIMEOUT_S
    while _read(running_head).limits != wanted:
        if time.monotonic() > deadline:
            log = shlex.quote("tail ~/watchdog.log")
            raise UserError(
                f"the watchdog has not read the new limits after {TIMEOUT_S} s. To see why, run: inv ssh --target "
                f"{target()} --command {log}"
            )
        time.sleep(1)
