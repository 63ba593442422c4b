"""The cluster's secrets in AWS Secrets Manager: filled from .env by `up`, deleted by `down`."""

import secrets
from typing import Any

from dotenv import dotenv_values

import settings
from cluster.common.cluster_file import ClusterFile
from cluster.submission import SecretsSection

SERVER_KEY = "SERVE_API_KEY"


def upload(file: ClusterFile) -> None:
    """Store each named secret that .env has a value for; say which name has none anywhere.

    The key of the served model is made up where nobody chose one: nothing is ever served without.
    """
    client = file.client("secretsmanager")
    env_file = settings.PROJECT / ".env"
    values = dotenv_values(env_file) if env_file.is_file() else {}
    stored = names(file)
    for name in settings.load(SecretsSection, "secrets", profile="cluster").names:
        value = values.get(name) or ("" if name in stored or name != SERVER_KEY else secrets.token_urlsafe(32))
        if value:
            _store(client, file, name, value, is_new=name not in stored)
        elif name not in stored:
            print(f"secret {name} has no value: jobs run without it, until you put it into .env and run `up` again")


def names(file: ClusterFile) -> list[str]:
    """Names of the secrets that AWS holds for this cluster."""
    pages = (
        file.client("secretsmanager")
        .get_paginator("list_secrets")
        .paginate(Filters=[{"Key": "name", "Values": [f"{file.slug}/"]}])
    )
    return [secret["Name"].removeprefix(f"{file.slug}/") for page in pages for secret in page["SecretList"]]


def delete(file: ClusterFile) -> None:
    """Delete them at once: a deletion that waits is paid for while it waits."""
    client = file.client("secretsmanager")
    for name in names(file):
        client.delete_secret(SecretId=f"{file.slug}/{name}", ForceDeleteWithoutRecovery=True)


def _store(client: Any, file: ClusterFile, name: str, value: str, *, is_new: bool) -> None:
    identity = f"{file.slug}/{name}"
    if is_new:
        client.create_secret(Name=identity, SecretString=value, Tags=[{"Key": "ray-project", "Value": file.slug}])
    elif client.get_secret_value(SecretId=identity)["SecretString"] != value:
        client.put_secret_value(SecretId=identity, SecretString=value)
