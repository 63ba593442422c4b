"""What every target can do; the verbs know targets only by this."""

import logging
from dataclasses import dataclass, field
from typing import Protocol

from rich.table import Table

from cluster.job_client import JobClient
from pipeline.ray_support.private.job_sdk import LOGGERS


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to reach a running cluster from this machine."""

    target: str = "local"
    """Name of the target, for commands to type."""
    dashboard: str
    """URL of Ray's dashboard, which answers jobs, state and Serve; on loopback, through a tunnel where need be."""
    headers: dict[str, str] = field(repr=False)
    """Carries the cluster's token."""
    forwarded: dict[int, int] = field(default_factory=dict)
    """This machine's port for each port of the head that a tunnel brings here; empty where no tunnel is needed."""
    logs: str = "/tmp/ray/session_latest/logs on the head"
    """Folder of the jobs' logs, which exists until the cluster is taken down."""
    job_variables: dict[str, str]
    """Environment of each submitted job: its profile, and where it finds files and secrets."""

    def client(self) -> JobClient:
        """Return a job client. This and its methods raise `Unreachable` if the cluster does not answer."""
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)  # notes on packing and sockets are no news to a person
        return JobClient(self.dashboard, self.headers, self.where)

    @property
    def where(self) -> str:
        """The option that names the target in a command, with a space before it; empty for the default."""
        return "" if self.target == "local" else f" --target {self.target}"


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What is rented and what it costs, in words; empty where nothing is."""

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    verdict: str
    """"ok", "note" (works with a limit) or "wrong" (a verb will fail)."""
    text: str
    """What was found and, unless it is fine, what to type."""


class Target(Protocol):
    """A place where a cluster can run."""

    name: str
    profile: str

    def doctor(self) -> list[Finding]:
        """What can be known before anything is started."""

    def prepare(self) -> None:
        """Make what the cluster stands on and what costs nothing, as far as it is not there."""

    def up(self, yes: bool) -> None:
        """Start the cluster, or say that it is up; returns when jobs can be submitted.

        What costs money is asked for first, unless `yes`.
        """

    def connect(self) -> Connection:
        """The running cluster. Raises `settings.UserError` when it is not up."""

    def files(self) -> dict[str, str]:
        """Environment in which this machine finds what the jobs wrote, whether the cluster is up or not."""

    def shell(self, command: str) -> int:
        """Run `command` on the head, or a shell for a person where it is empty; returns its exit code."""

    def dollars_per_machine_hour(self) -> dict[int, float]:
        """The cheapest price of a machine with A100s, by the GiB of each; empty where nothing costs."""

    def bill(self) -> Bill:
        """What is rented, what it costs, what is pending and why, and what AWS refused."""

    def down(self) -> list[str]:
        """End the cluster and return what is left of it, in words; an empty list is the proof that nothing is."""
