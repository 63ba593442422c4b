"""What every target can do; the verbs know targets only by this."""

import logging
from dataclasses import dataclass, field
from typing import Protocol

from ray.job_submission import JobSubmissionClient


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to reach a running cluster from this machine."""

    dashboard: str
    """URL of Ray's dashboard, which answers jobs, state and Serve; on loopback, through a tunnel where need be."""
    headers: dict[str, str] = field(repr=False)
    """Carries the cluster's token."""
    job_variables: dict[str, str]
    """Environment of each submitted job: its profile, and where it finds files and secrets."""

    def client(self) -> JobSubmissionClient:
        """Ray's own client for jobs."""
        for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
            logging.getLogger(name).setLevel(logging.ERROR)  # notes on packing and sockets are no news to a person
        return JobSubmissionClient(self.dashboard, headers=self.headers)


class Target(Protocol):
    """A place where a cluster can run."""

    name: str
    profile: str

    def up(self) -> None:
        """Start the cluster, or say that it is up; returns when jobs can be submitted."""

    def connect(self) -> Connection:
        """The running cluster. Raises `settings.Refusal` when it is not up."""

    def down(self) -> list[str]:
        """End the cluster and return what is left of it, in words; an empty list is the proof that nothing is."""
