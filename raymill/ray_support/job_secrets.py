"""Reads secrets by name in each process that needs them, so that no upload, command or job metadata contains a value.

`inv submit` sets SECRET_NAMES (comma-separated) and the source of their values: SECRETS_FILE on this machine, or
SECRETS_PREFIX for AWS Secrets Manager, where a secret is named PREFIX + NAME. Ray calls `load` in every worker
(`worker_process_setup_hook`). A driver must call `load` itself.
"""

import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from raymill.job_context import JobContext


def load() -> None:
    """Add the named secrets to this process's environment, unless they are set. Names without a value stay unset."""
    submitted = JobContext.current().secret_names
    # `python -m jobs.JOB` runs without `inv submit`, so nothing names the secrets: load all of .env
    names = submitted.split(",") if submitted else _from_file()
    for name, value in read(name for name in names if name not in os.environ).items():
        os.environ[name] = value


def read(names: Iterable[str]) -> dict[str, str]:
    """Return the current values of these secrets, ignoring the environment. Names without a value are left out.

    Raises:
        OSError or a botocore exception: the secrets cannot be read at the moment.
    """
    if prefix := JobContext.current().secrets_prefix:
        return _from_aws(prefix, names)
    values = _from_file()
    return {name: value for name in names if (value := values.get(name))}


def _from_file() -> Mapping[str, str | None]:
    # not settings.PROJECT, because every worker process runs this first and would have to import pydantic
    file = Path(JobContext.current().secrets_file or Path(__file__).parents[2] / ".env")
    return dotenv_values(file) if file.is_file() else {}


def _from_aws(prefix: str, names: Iterable[str]) -> dict[str, str]:
    client = _secrets_manager()
    values = {}
    for name in names:
        try:
            found = client.get_secret_value(SecretId=prefix + name, VersionStage="AWSCURRENT")
            values[name] = found["SecretString"]
        except client.exceptions.ResourceNotFoundException:
            continue  # a name without a value, as in .env
    return values


@functools.cache
def _secrets_manager() -> Any:
    """Return a boto3 client that uses this machine's role."""
    import boto3  # imported late: the local target does not need it

    return boto3.client("secretsmanager")
