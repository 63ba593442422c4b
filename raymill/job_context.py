"""What a verb tells the jobs that it submits. Imports little, because every worker process of a job reads it first."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """Each field is an environment variable of a job's processes, in capital letters. None: the variable is not set."""

    inv_target: str | None = None
    """Target of the verb, for the commands in messages."""
    profile: str | None = None
    """Profile of settings.toml: `local` or `cluster`."""
    project_dir: str | None = None
    """Folder or URI with `data/` and `runs/`. Submitted jobs run in a copy of the project, which lacks both."""
    secret_names: str | None = None
    """Names of the secrets, separated by commas."""
    secrets_file: str | None = None
    """The file with the values of the secrets."""
    secrets_prefix: str | None = None
    """If the values are in AWS Secrets Manager: prefix of their names there."""
    cluster_nodes: str | None = None
    """All nodes that the cluster can have, as JSON: see capacity.py."""
    gang_offers: str | None = None
    """Zones and markets for training, as JSON: see gang.py."""
    serve_offers: str | None = None
    """Zones and markets for serving, as JSON: see gang.py."""
    gang_selector: str | None = None
    """Labels of the zone in which a trial of `tune` runs, as JSON."""
    access_logs: str | None = None
    """Folder for the access logs of served models."""
    fit_report: str | None = None
    """File for the measurements of `inv fit`, which runs the job on a fake GPU."""
    job_options_checked_for: str | None = None
    """If set, the job only checks its options. This is the command to show in messages."""

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all variables."""
        return [field.name.upper() for field in fields(cls)]

    @classmethod
    def current(cls) -> "JobContext":
        """Return what this process was told."""
        return cls.from_variables(os.environ)

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> "JobContext":
        """Return what environment variables say."""
        return cls(**{field.name: variables.get(field.name.upper()) for field in fields(cls)})

    def variables(self) -> dict[str, str]:
        """Return the environment variables."""
        return {name.upper(): value for name, value in asdict(self).items() if value is not None}
