"""The cluster's secrets in AWS Secrets Manager. `up` uploads them from .env, and `down` deletes them."""

import random
import secrets
import time
from collections.abc import Callable
from typing import Any

from dotenv import dotenv_values

from raymill import settings
from raymill.aws.deletion import attempt_each
from raymill.common.cluster_file import ClusterFile, target
from raymill.errors import UserError
from raymill.serving.keys import OTHERS_SECRET, OWNER_SECRET
from raymill.submission import SecretsSection

NAME_TIMEOUT_S = 120
RETRY_S = 3
UPDATE_TIMEOUT_S = 60.0
UPDATE_RETRY_S = 1.0
CURRENT = "AWSCURRENT"
"""Label of the version that the server reads."""
PENDING = "PENDING"
"""Label of the version that becomes the current one. A secret may have 20 labels, so all use the same."""
NO_KEYS = ","
"""The value without keys, because AWS stores no empty secret. The server reads it as an empty list."""


def upload(file: ClusterFile) -> None:
    """Store each secret of [secrets] that has a value in .env. Print which secrets have no value there or on AWS.

    The keys of other people that are stored on AWS stay, because an old .env could bring back a revoked key.

    If SERVE_API_KEY is such a secret, generate its value instead, because the server needs a key.
    """
    client = file.client("secretsmanager")
    env_file = settings.PROJECT / ".env"
    values = dotenv_values(env_file) if env_file.is_file() else {}
    stored = names(file)
    for name in settings.load(SecretsSection, "secrets", profile="cluster").names:
        value = values.get(name) or ("" if name in stored or name != OWNER_SECRET else secrets.token_urlsafe(32))
        if name == OTHERS_SECRET and name in stored:
            if value and value != KeyList(file).read():
                command = f"inv keys --target {target()}"
                print(f"{name} in .env differs from that on AWS, which stays. To change it, run: {command}")
        elif value:
            _store(client, file, name, value, is_new=name not in stored)
        elif name not in stored:
            print(
                f"secret {name} has no value, so jobs run without it. "
                f"Put it into .env, then run: inv up --target {target()}"
            )


class KeyList:
    """The value of SERVE_API_KEYS on AWS."""

    name = "AWS Secrets Manager"

    def __init__(self, file: ClusterFile) -> None:
        self._file, self._client = file, file.client("secretsmanager")
        self._identity = f"{file.slug}/{OTHERS_SECRET}"

    def read(self) -> str:
        """Return the value, or "" if it has none.

        Raises:
            UserError: the cluster is not up.
        """
        self._check_that_it_is_up()
        if not _exists(self._client, self._identity):
            return ""
        return self._current()["SecretString"]

    def _current(self) -> dict[str, str]:
        return self._client.get_secret_value(SecretId=self._identity, VersionStage=CURRENT)

    def _check_that_it_is_up(self) -> None:
        if not _exists(self._client, f"{self._file.slug}/{OWNER_SECRET}"):
            raise UserError(
                f"{target()} is not up, so it has no keys. Run: inv up --target {target()}, which stores those in .env"
            )

    def update(self, change: Callable[[str], str]) -> None:
        """Replace the value with what `change` returns for it, unless somebody else has changed it in the meantime.

        Then read it again. The new value becomes a version of the secret with the label PENDING. It gets AWSCURRENT
        from the version that was read, which fails if that no longer has it:
        https://docs.aws.amazon.com/secretsmanager/latest/apireference/API_UpdateSecretVersionStage.html

        Raises:
            UserError: the cluster is not up, or others change the value for UPDATE_TIMEOUT_S.
        """
        started = time.monotonic()
        while not self._try_to_update(change):
            if time.monotonic() - started > UPDATE_TIMEOUT_S:
                raise UserError(
                    f"AWS has refused to change the secret {self._identity} for {UPDATE_TIMEOUT_S:.0f} s, because "
                    "others change it. Run the command again"
                )
            time.sleep(random.uniform(0, UPDATE_RETRY_S))

    def _try_to_update(self, change: Callable[[str], str]) -> bool:
        exceptions = self._client.exceptions
        self._check_that_it_is_up()
        if not _exists(self._client, self._identity):
            value = change("") or NO_KEYS
            try:
                _create(self._client, self._identity, value, self._file.slug)
            except exceptions.ResourceExistsException:
                return False
            return True
        found = self._current()
        value = change(found["SecretString"]) or NO_KEYS
        if value == found["SecretString"]:
            return True
        new = self._client.put_secret_value(SecretId=self._identity, SecretString=value, VersionStages=[PENDING])
        try:
            self._client.update_secret_version_stage(
                SecretId=self._identity,
                VersionStage=CURRENT,
                RemoveFromVersionId=found["VersionId"],
                MoveToVersionId=new["VersionId"],
            )
        except (exceptions.InvalidParameterException, exceptions.ResourceNotFoundException):
            return False
        return True


def names(file: ClusterFile) -> list[str]:
    """Return the names of this cluster's secrets on AWS.

    AWS's own list lags behind by minutes, so this asks for each secret in the list or in [secrets].
    """
    client = file.client("secretsmanager")
    pages = client.get_paginator("list_secrets").paginate(Filters=[{"Key": "name", "Values": [f"{file.slug}/"]}])
    listed = {secret["Name"].removeprefix(f"{file.slug}/") for page in pages for secret in page["SecretList"]}
    configured = settings.load(SecretsSection, "secrets", profile="cluster").names
    return [name for name in sorted({*listed, *configured}) if _exists(client, f"{file.slug}/{name}")]


def delete(file: ClusterFile) -> list[str]:
    """Delete all secrets immediately, because `up` cannot store a secret while its deletion is scheduled.

    Return what could not be deleted and why.
    """
    client = file.client("secretsmanager")

    def delete_one(name: str) -> None:
        client.delete_secret(SecretId=f"{file.slug}/{name}", ForceDeleteWithoutRecovery=True)

    return attempt_each("secret", lambda: names(file), delete_one)


def _exists(client: Any, identity: str) -> bool:
    try:
        return "DeletedDate" not in client.describe_secret(SecretId=identity)
    except client.exceptions.ResourceNotFoundException:
        return False


def _store(client: Any, file: ClusterFile, name: str, value: str, *, is_new: bool) -> None:
    identity = f"{file.slug}/{name}"
    if is_new:
        _create(client, identity, value, file.slug)
    elif client.get_secret_value(SecretId=identity)["SecretString"] != value:
        client.put_secret_value(SecretId=identity, SecretString=value)


def _create(client: Any, identity: str, value: str, slug: str) -> None:
    """Create a secret. If AWS has not finished the deletion of one with the same name, wait for it.

    Raises:
        UserError: the name is still not free after NAME_TIMEOUT_S.
    """
    started = time.monotonic()
    while True:
        try:
            client.create_secret(Name=identity, SecretString=value, Tags=[{"Key": "ray-project", "Value": slug}])
        except client.exceptions.InvalidRequestException as error:
            if "scheduled for deletion" not in str(error):
                raise
            if time.monotonic() - started > NAME_TIMEOUT_S:
                raise UserError(
                    f"AWS is still deleting the secret {identity} after {NAME_TIMEOUT_S} s. Wait a few minutes, then "
                    f"run: inv up --target {target()}"
                ) from None
            time.sleep(RETRY_S)
        else:
            return
