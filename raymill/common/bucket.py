"""The project's bucket: its name, how to reach it, and the note that a cluster leaves there if it shuts itself down."""

import datetime
import re

import botocore.exceptions
from pydantic import field_validator

from raymill import settings
from raymill.common import aws_session, remaining_costs
from raymill.common.cluster_file import ClusterFile, target
from raymill.errors import UserError

NOTE = "cluster/ended.txt"
"""Key of the object that says why the cluster shut itself down."""
LOGS = "cluster/logs/"
"""Prefix of the clusters' logs. The keys continue with SESSION/NODE/NAME (see raymill/node/log_shipping.py)."""
LIFECYCLE_RULES = [
    # The parts of an unfinished upload, for example of a killed job, cost money, and no listing of objects shows them.
    {
        **{"ID": "unfinished-uploads", "Status": "Enabled", "Filter": {"Prefix": ""}},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2},
    },
    {"ID": "old-logs", "Status": "Enabled", "Filter": {"Prefix": LOGS}, "Expiration": {"Days": 90}},
]


class StorageSection(settings.Section):
    """[cluster.storage] of settings.toml."""

    bucket: str = ""
    """Name of your bucket in the cluster's region. If empty, the stack makes one."""

    @field_validator("bucket")
    @classmethod
    def _is_a_name(cls, bucket: str) -> str:
        if bucket and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            raise ValueError("this is not the name of a bucket. Write it without s3:// and without folders")
        return bucket


def users_own() -> str:
    """Return the name of the user's bucket in settings.toml, or "" if the stack makes the project's bucket."""
    return settings.load(StorageSection, "storage", profile="cluster").bucket


def name(file: ClusterFile) -> str:
    """Return the name of the project's bucket, whether or not it exists."""
    if bucket := users_own():
        return bucket
    account = file.client("sts").get_caller_identity()["Account"]
    return f"{file.slug}-{account}-{file.region}"  # as in cluster/stack.yaml and raymill/node/unpack.py


def exists(file: ClusterFile) -> bool:
    """Return whether the bucket exists."""
    try:
        file.client("s3").head_bucket(Bucket=name(file))
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] == "404":
            return False
        raise
    return True


def require(file: ClusterFile) -> None:
    """Raise `UserError` if there is no bucket, or a foreign one, because this would look like no work."""
    try:
        found = exists(file)
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "403":
            raise
        found = False
    if not found:
        raise UserError(
            f"there is no bucket s3://{name(file)} that admits your AWS credentials, so {file.slug} has no saved work "
            f"there. Check the account and the region, or run: inv up --target {target()}"
        )


def problem(file: ClusterFile) -> str:
    """Return why the cluster cannot use the user's bucket and what to do, or "" if it can or there is none."""
    if not (bucket := users_own()):
        return ""
    where = f"bucket {bucket} in [cluster.storage] of settings.toml"
    try:
        region = file.client("s3").head_bucket(Bucket=bucket)["BucketRegion"]
    except botocore.exceptions.ClientError as error:
        code = error.response["Error"]["Code"]
        if code == "404":
            return f"{where} does not exist. Run: aws s3 mb s3://{bucket} --region {file.region}"
        if code == "403":
            return f"{where} does not admit you. Ask its owner for access, or set another bucket"
        raise
    if region != file.region:
        return f"{where} is in {region}, but the cluster is in {file.region}. Set a bucket in {file.region}"
    return ""


def add_lifecycle_rules(file: ClusterFile) -> None:
    """Make S3 delete the parts of uploads that are not finished after two days, and logs after 90 days.

    The bucket outlives the stack, which therefore cannot own these rules. Rules that the user has added stay, and the
    user's own bucket gets no rules.
    """
    if users_own():
        return
    client, own = file.client("s3"), name(file)
    try:
        rules = client.get_bucket_lifecycle_configuration(Bucket=own)["Rules"]
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchLifecycleConfiguration":
            raise
        rules = []
    if any(rule not in rules for rule in LIFECYCLE_RULES):
        ids = [rule["ID"] for rule in LIFECYCLE_RULES]
        others = [one for one in rules if one.get("ID") not in ids]
        configuration = {"Rules": [*others, *LIFECYCLE_RULES]}
        client.put_bucket_lifecycle_configuration(Bucket=own, LifecycleConfiguration=configuration)


def access(file: ClusterFile) -> dict[str, str]:
    """Return the environment variables that Arrow on this machine needs to reach the bucket. Never pass them to a job.

    They include credentials, because boto3 finds these in more places than Arrow does.
    """
    credentials = aws_session.credentials(file.region)
    variables = {
        "AWS_DEFAULT_REGION": file.region,
        "AWS_ENDPOINT_URL_S3": file.client("s3").meta.endpoint_url,
        "AWS_ACCESS_KEY_ID": credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": credentials.secret_key,
        "AWS_SESSION_TOKEN": credentials.token,
    }
    return {name: value for name, value in variables.items() if value}


def leave_note(file: ClusterFile, reason: str) -> None:
    """Save why the cluster shut itself down, and what still costs money, for `inv status`."""
    ended = f"it shut itself down at {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC: {reason}"
    words = f"{ended}. {remaining_costs.describe()}"
    file.client("s3").put_object(Bucket=name(file), Key=NOTE, Body=words.encode())


def note(file: ClusterFile) -> str:
    """Return why the last cluster shut itself down, in parentheses, or "" if it did not."""
    try:
        answer = file.client("s3").get_object(Bucket=name(file), Key=NOTE)
    except botocore.exceptions.ClientError:  # there is no note or no bucket
        return ""
    return f" ({answer['Body'].read().decode()})"


def forget_note(file: ClusterFile) -> None:
    """Delete the note of the last cluster."""
    file.client("s3").delete_object(Bucket=name(file), Key=NOTE)
