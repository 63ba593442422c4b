"""The interface of a target. Verbs use targets only through it."""

import datetime
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from rich.table import Table

from raymill.doctor import Finding
from raymill.errors import UserError
from raymill.job_client import JobClient
from raymill.ray_support.private.job_sdk import LOGGERS


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to reach a running cluster from this machine."""

    target: str = "local"
    dashboard: str
    """URL of Ray's dashboard, which also answers requests about jobs, state and Serve.

    It is always a loopback address. If the head is on another machine, a tunnel forwards requests to it.
    """
    headers: dict[str, str] = field(repr=False)
    """HTTP headers with the cluster's token."""
    forwarded_ports: dict[int, int] = field(default_factory=dict)
    """For each forwarded port of the head, the tunnel's local port. Empty if there is no tunnel."""
    log_folder: str = "/tmp/ray/session_latest/logs on the head"
    """Where the logs of jobs are, until the cluster is taken down."""
    job_variables: dict[str, str]
    """Environment variables of each submitted job, such as its profile and where it finds files and secrets."""
    capacity_variables: Callable[[], dict[str, str]] = dict
    """Returns further variables, which describe the nodes that the cluster can have. On AWS, this takes a second."""
    relay_metrics: Callable[[], str] = str
    """Relays the nodes' metrics to this machine until this process ends. Returns the relay's HOST:PORT, which answers
    /HOST:PORT with the metrics of a node, given `headers`; "" if this machine can reach the nodes itself."""

    def client(self) -> JobClient:
        """Return a job client. Raises `Unreachable` if the cluster does not answer, as do the client's methods."""
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)  # users do not need Ray's notes on packages and sockets
        return JobClient(self.dashboard, self.headers, self.target_option)

    @property
    def target_option(self) -> str:
        """The option `--target`, with a leading space, for commands in messages. Empty for the default target."""
        return "" if self.target == "local" else f" --target {self.target}"


@dataclass(frozen=True, kw_only=True)
class CloudStatus:
    """What `inv status` adds for rented instances. Empty if nothing is rented."""

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Copy:
    """A text that the cluster saved in the bucket."""

    text: str
    saved: datetime.datetime


@dataclass(frozen=True, kw_only=True)
class PastJob:
    """A job of a cluster that saved its logs in the bucket. The cluster may still be running."""

    id: str
    owner: str
    """Who submitted it with `inv submit`, or ""."""
    command: str
    state: str
    """As in `inv status`. A job that ran when its cluster ended, "ended with the cluster"."""
    started: float
    """In seconds since 1970, like `ended`."""
    ended: float
    """If the job has not ended, when the cluster last saved its state."""
    exit_code: int
    message: str
    """What Ray says about the state, such as why the job did not start."""
    gpu_busy_percent: float | None = None
    """How busy all GPUs of the cluster were while the job ran. None if there was no GPU."""


@dataclass(frozen=True)
class PastLog:
    """The log of a past job."""

    job: PastJob
    copy: Copy | None
    """None if the job did not start."""


class NotOnCluster(UserError):
    """No cluster runs, or the running one does not know the job."""


@dataclass(frozen=True, kw_only=True)
class WantedBlock:
    """The Capacity Block that `inv capacity` searches for."""

    instances: int
    """0: max_workers of cluster.yaml."""
    days: int
    instance_type: str
    """Empty: the GPU type of cluster.yaml."""
    earliest: str
    """The first day, as YYYY-MM-DD, or empty."""
    latest: str
    """The day by which it ends, as YYYY-MM-DD, or empty."""


class KeyStore(Protocol):
    """A place that stores the value of the secret SERVE_API_KEYS."""

    name: str
    """Its name in messages."""

    def read(self) -> str:
        """Return the value, or "" if it has none."""

    def update(self, change: Callable[[str], str]) -> None:
        """Replace the value with what `change` returns for it. Nobody else's change is lost. Hold `env_file.locked`.

        `change` may be called several times.
        """


class Target:
    """A place where a cluster can run."""

    name: str
    profile: str

    def by_default(self, method: str) -> NoReturn:
        """Do what this target does in a method that it does not define.

        Raises:
            UserError: the target does not support what the method does.
        """
        raise UserError(f"{self.name} cannot do this: {method}")

    def doctor(self) -> list[Finding]:
        """Check everything that can be checked before the cluster starts."""
        self.by_default("doctor")

    def prepare(self, owner: str = "") -> None:
        """Create everything that the cluster needs, except its instances. Keep what exists.

        Asks before using the cluster of another owner, unless `owner` names this owner. So do `up` and `down`.
        """
        self.by_default("prepare")

    def up(self, yes: bool, wait: bool = False, owner: str = "") -> None:
        """Start the cluster unless it is up. Return when jobs can be submitted.

        Asks before starting anything that costs money, unless `yes` is set. If instances are reserved for later, `wait`
        waits until then.
        """
        self.by_default("up")

    def show_capacity(self, wanted: WantedBlock) -> None:
        """Show the Capacity Blocks that AWS offers."""
        self.by_default("show_capacity")

    def buy_capacity(self, offering: str, yes: bool) -> None:
        """Buy a Capacity Block for this cluster. Asks first, unless `yes` is set."""
        self.by_default("buy_capacity")

    def show_limits(self) -> None:
        """Show the limits of the running cluster, and how much of them is used."""
        self.by_default("show_limits")

    def change_limits(self, given: Mapping[str, str], yes: bool) -> None:
        """Change the given limits of the running cluster. Asks before it can cost more, unless `yes` is set.

        The keys are those of [cluster.limits] in settings.toml.
        """
        self.by_default("change_limits")

    def bake(self) -> None:
        """Store the head's packages in the bucket, from which new nodes unpack them."""
        self.by_default("bake")

    def connect(self) -> Connection:
        """Return a connection to the running cluster. Raises `UserError` if it is not up."""
        self.by_default("connect")

    def storage_variables(self) -> dict[str, str]:
        """Return the environment variables that this machine needs to read the jobs' output.

        The cluster need not be up.
        """
        self.by_default("storage_variables")

    def shell(self, command: str) -> int:
        """Run `command` on the head, or open a shell if it is empty. Return the exit code."""
        self.by_default("shell")

    def configure_ssh(self) -> None:
        """Add the head to this user's ssh configuration, for other programs. `down` removes it."""
        self.by_default("configure_ssh")

    def notebook(self) -> str:
        """Start JupyterLab on the head, until this process ends. Return its URL on this machine."""
        self.by_default("notebook")

    def dollars_per_instance_hour(self, types: Collection[str] = ()) -> dict[str, float]:
        """Return the lowest hourly price of the cluster's instance types and of `types`. Empty if nothing costs money.

        A type that is not for sale is left out.
        """
        self.by_default("dollars_per_instance_hour")

    def cloud_status(self) -> CloudStatus:
        """Return what is rented, what it costs, what is pending and why, and what AWS refused."""
        self.by_default("cloud_status")

    def past_jobs(self) -> list[PastJob]:
        """Return the latest jobs of all clusters, the oldest first. No cluster need be up."""
        self.by_default("past_jobs")

    def past_log(self, job_id: str) -> PastLog | None:
        """Return the log of a past job, or of the latest one if `job_id` is empty. None if there is no such job."""
        self.by_default("past_log")

    def access_logs(self, since: datetime.datetime) -> Iterable[str]:
        """Return the access logs that were written to since then. No cluster need be up."""
        self.by_default("access_logs")

    def key_stores(self) -> Sequence[KeyStore]:
        """Return where API keys are stored. The cluster's server reads the first one."""
        self.by_default("key_stores")

    def down(self, owner: str = "", drain_s: int = 0) -> list[str]:
        """Stop the cluster, and delete its resources but not your files. Return what could not be deleted.

        Answers of served models that are running get `drain_s` to end.
        """
        self.by_default("down")
