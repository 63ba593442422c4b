"""`inv doctor --target aws`: check what can be checked before anything costs money. Changes nothing."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NoConnectionError

from raymill.aws import aws_errors, identity, rejected_credentials
from raymill.aws.doctor import jobs, laptop, owner, permissions, quotas, region, reserved
from raymill.aws.doctor.account import Account, denied_action, retry
from raymill.common import aws_session
from raymill.common.cluster_file import ClusterFile
from raymill.doctor import Finding
from raymill.errors import UserError

SERVICES = ("sts", "iam", "ec2", "s3", "cloudformation", "service-quotas", "ssm", "secretsmanager", "kms")
F = TypeVar("F", bound=ClusterFile)

REMOTE_CHECKS: dict[str, Callable[[Account], Iterator[Finding]]] = {
    "permissions": permissions.check,
    "quotas": quotas.check,
    "spot": region.check_spot_role,
    "reservation": reserved.check,
    "bucket": region.check_bucket,
    "zones": region.check_zones,
    "network": region.check_network,
    "images": region.check_images,
    "disks": region.check_disk_key,
    "secrets": jobs.check_secrets,
    "prices": region.check_prices,
    "owner": owner.check,
}
"""Checks that ask AWS."""
LOCAL_CHECKS: dict[str, Callable[[ClusterFile], Iterator[Finding]]] = {
    "versions": laptop.check_versions,
    "programs": laptop.check_programs,
    "settings": jobs.check_settings,
    "upload": jobs.check_upload,
    "paths": jobs.check_paths,
    "limits": jobs.check_limits,
}
"""Checks that need only this machine."""


def check(file: ClusterFile) -> list[Finding]:
    """Check what `inv up --target aws` and the jobs need."""
    try:
        return _check(file)
    finally:
        aws_session.start(file.region)  # restores the usual timeouts and retries for later calls


def _check(file: ClusterFile) -> list[Finding]:
    try:
        account = _sign_in(file)
    except UserError as error:
        unchecked = Finding("error", f"{error}. Not checked: {', '.join(REMOTE_CHECKS)}")
        return [unchecked, *_run_all(LOCAL_CHECKS, file)]
    with ThreadPoolExecutor(len(REMOTE_CHECKS)) as pool:  # in parallel, because calls to AWS are slow
        remote = [pool.submit(list, _run(subject, check, account)) for subject, check in REMOTE_CHECKS.items()]
        local = [*_run_all(LOCAL_CHECKS, account), *_run("GPUs", jobs.check_gpus, account)]
    signed_in = Finding("ok", f"signed in to AWS as {account.arn}")
    return [signed_in, *(finding for future in remote for finding in future.result()), *local]


def _sign_in(file: ClusterFile) -> Account:
    """Return the account.

    Raises:
        UserError: there is no connection, there are no valid credentials, or they are not for the cluster of
            this checkout.
    """
    try:
        # short timeouts, so that the report comes quickly even if the network is down
        aws_session.start(file.region, Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 2}))
        clients = {service: file.client(service) for service in SERVICES}
        account = Account(file.content, file.digest, clients["sts"].get_caller_identity()["Arn"], clients)
        identity.check(account)
    except (NoConnectionError, HTTPClientError) as error:
        raise UserError(
            f"no connection to AWS ({error}). Check the network, HTTPS_PROXY, and region in cluster/cluster.yaml"
        ) from None
    except (BotoCoreError, ClientError) as error:
        if isinstance(error, ClientError) and rejected_credentials.is_cause(error):
            raise UserError(rejected_credentials.explain(error, file.region)) from None
        raise UserError(
            f"no valid AWS credentials ({error}). Run aws configure or aws sso login, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        ) from None
    return account


def _run_all(checks: dict[str, Callable[[F], Iterator[Finding]]], file: F) -> list[Finding]:
    return [finding for subject, check in checks.items() for finding in _run(subject, check, file)]


def _run(subject: str, check: Callable[[F], Iterator[Finding]], file: F) -> Iterator[Finding]:
    """Yield the findings of a check. If an error ends the check, yield a finding about the error."""
    try:
        yield from check(file)
    except UserError as error:
        yield Finding("error", str(error))
    except ClientError as error:
        if denial := aws_errors.denial(error):
            yield Finding("error", f"{subject}: not checked. {denial}. {retry()}")
        elif aws_errors.missing_permission(error):
            action = denied_action(error, permissions.KNOWN_ACTIONS)
            yield Finding("error", f"{subject}: not checked. Ask for the permission {action}. {retry()}")
        else:
            yield Finding("warning", f"{subject}: not checked, because AWS says: {error}. {retry()}")
    except BotoCoreError as error:
        yield Finding("warning", f"{subject}: not checked, because AWS does not answer ({error}). {retry()}")
