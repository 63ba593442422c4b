"""The permissions that each AWS call needs, according to AWS's service authorization reference.

A call that is not listed here needs its action on "*", which only a policy for all resources grants.
https://docs.aws.amazon.com/service-authorization/latest/reference/reference_policies_actions-resources-contextkeys.html
"""

import json
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import xmltodict
from moto.ec2.models import ec2_backends
from moto.s3.models import s3_backends
from moto.secretsmanager.models import secretsmanager_backends

from raymill.emulator.iam import AwsError, Permission
from raymill.emulator.moto_instances import ACCOUNT
from raymill.emulator.reservations import TARGET

# Maps the prefix of an EC2 resource's id to the resource's type in ARNs.
EC2_RESOURCE_TYPES = {"i": "instance", "vol": "volume", "eni": "network-interface", "key": "key-pair"}
S3_OBJECT_ACTIONS = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "PUT": "s3:PutObject", "DELETE": "s3:DeleteObject"}
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingKMSEncryption.html
S3_KEY_ACTIONS = {"GET": ("Decrypt",), "PUT": ("GenerateDataKey",), "POST": ("Decrypt", "GenerateDataKey")}
SCHEDULE_ACTIONS = {"GET": "Get", "POST": "Create", "PUT": "Update", "DELETE": "Delete"}
RESOLVE = "resolve:ssm:"


def required_by(
    service: str, action: str, region: str, parameters: dict[str, Any], http: dict[str, Any], account: str = ACCOUNT
) -> list[Permission]:
    """Return the permissions that a call needs. `http` has the method, path, query and body, which matter for S3.

    `account` is that of the caller.
    """
    if (service, action) == ("sts", "GetCallerIdentity"):
        return []  # every caller may call it
    if service == "s3":
        return [*_s3(**http), *_key_of_bucket(region, http["method"], http["path"])]
    if service == "ec2" and action == "RunInstances":
        return list(_run_instances(account, region, parameters))
    if service == "ec2" and action in ("CreateTags", "TerminateInstances"):
        return list(_on_tagged_resources(action, account, region, parameters))
    if service == "ssm" and action.startswith("GetParameter"):
        names = parameters.get("Names") or [parameters.get("Name") or parameters.get("Path", "")]
        return [Permission(f"ssm:{action}", _parameter_arn(account, region, name), {}) for name in names]
    if service == "scheduler":
        return list(_schedule(account, region, http["method"], http["path"].rpartition("/")[2], http["body"]))
    if service == "secretsmanager" and action == "GetSecretValue":
        return [Permission("secretsmanager:GetSecretValue", _secret_arn(account, region, parameters["SecretId"]), {})]
    if service == "secretsmanager" and action == "CreateSecret" and parameters.get("Tags"):
        return [Permission(f"secretsmanager:{one}", "*", {}) for one in ("CreateSecret", "TagResource")]
    return [Permission(f"{service}:{action}", "*", {})]


def _schedule(account: str, region: str, method: str, name: str, body: bytes) -> Iterator[Permission]:
    arn = f"arn:aws:scheduler:{region}:{account}:schedule/default/{name}"
    yield Permission(f"scheduler:{SCHEDULE_ACTIONS[method]}Schedule", arn, {})
    if method in ("POST", "PUT"):
        role = json.loads(body)["Target"]["RoleArn"]
        yield Permission("iam:PassRole", role, {"iam:PassedToService": "scheduler.amazonaws.com"})


def _run_instances(account: str, region: str, parameters: dict[str, str]) -> Iterator[Permission]:
    arn = f"arn:aws:ec2:{region}:{account}:"
    created = ("instance", "network-interface", "volume")
    tags = _tag_specifications(parameters)
    for kind in created:
        yield Permission(
            "ec2:RunInstances", f"{arn}{kind}/*", {f"aws:RequestTag/{k}": v for k, v in tags.get(kind, {}).items()}
        )
    for kind in tags:
        yield Permission("ec2:CreateTags", f"{arn}{kind}/*", {"ec2:CreateAction": "RunInstances"})
    if parameters.get("InstanceMarketOptions.MarketType") == "spot":
        yield Permission("ec2:RunInstances", f"{arn}spot-instances-request/*", {})
    image = parameters["ImageId"]
    if image.startswith(RESOLVE):
        yield Permission("ssm:GetParameters", _parameter_arn(account, region, image.removeprefix(RESOLVE)), {})
    yield Permission("ec2:RunInstances", f"arn:aws:ec2:{region}::image/ami-any", {})
    yield from (
        Permission("ec2:RunInstances", resource, {})
        for resource in _existing_resources(account, region, arn, parameters)
    )
    if profile := parameters.get("IamInstanceProfile.Name"):
        passed = f"arn:aws:iam::{account}:role/{profile}"  # stack.yaml gives role and profile the same name
        yield Permission("iam:PassRole", passed, {"iam:PassedToService": "ec2.amazonaws.com"})


def _existing_resources(account: str, region: str, arn: str, parameters: dict[str, str]) -> Iterator[str]:
    """Yield the ARNs of the existing resources that a launch uses."""
    for key, value in parameters.items():
        if re.fullmatch(r"(NetworkInterface\.\d+\.)?SubnetId", key):
            yield f"{arn}subnet/{value}"
        elif re.fullmatch(r"(NetworkInterface\.\d+\.)?SecurityGroupId\.\d+", key):
            yield f"{arn}security-group/{value}"
    if reservation := parameters.get(TARGET):
        yield f"{arn}capacity-reservation/{reservation}"
    if name := parameters.get("KeyName"):
        yield f"{arn}key-pair/{name}"
    if name := parameters.get("Placement.GroupName"):
        yield f"{arn}placement-group/{name}"
    if name := parameters.get("LaunchTemplate.LaunchTemplateName"):
        templates = ec2_backends[account][region].launch_templates.values()
        yield from (f"{arn}launch-template/{one.id}" for one in templates if one.name == name)


def _tag_specifications(parameters: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return the tags of each resource type in the call."""
    tags: dict[str, dict[str, str]] = {}
    for key, kind in parameters.items():
        if found := re.fullmatch(r"TagSpecification\.(\d+)\.ResourceType", key):
            prefix = f"TagSpecification.{found[1]}.Tag."
            numbers = {name.split(".")[3] for name in parameters if name.startswith(prefix)}
            tags[kind] = {parameters[f"{prefix}{n}.Key"]: parameters[f"{prefix}{n}.Value"] for n in numbers}
    return tags


def _on_tagged_resources(action: str, account: str, region: str, parameters: dict[str, str]) -> Iterator[Permission]:
    """Yield the permission for each resource in the call, with the resource's tags."""
    backend = ec2_backends[account][region]
    for key, resource_id in parameters.items():
        if re.fullmatch(r"(InstanceId|ResourceId)\.\d+", key):
            kind = EC2_RESOURCE_TYPES.get(resource_id.partition("-")[0], "*")
            context = {f"aws:ResourceTag/{k}": v for k, v in backend.tags.get(resource_id, {}).items()}
            yield Permission(f"ec2:{action}", f"arn:aws:ec2:{region}:{account}:{kind}/{resource_id}", context)


def _parameter_arn(account: str, region: str, name: str) -> str:
    owner = "" if name.startswith("/aws/") else account  # public parameters belong to no account
    return f"arn:aws:ssm:{region}:{owner}:parameter/{name.lstrip('/')}"


def _secret_arn(account: str, region: str, name: str) -> str:
    """Return a secret's ARN, which ends with random letters. If there is no such secret, the letters are fixed."""
    backend = secretsmanager_backends[account][region]
    secret = backend.secrets.get(name)
    return secret.arn if secret else f"arn:aws:secretsmanager:{region}:{account}:secret:{name}-AbCdEf"


def _s3(method: str, path: str, query: str, body: bytes) -> Iterator[Permission]:
    bucket, _, key = urllib.parse.unquote(path).lstrip("/").partition("/")
    arn = f"arn:aws:s3:::{bucket}"
    options = urllib.parse.parse_qs(query, keep_blank_values=True)
    if not bucket:
        yield Permission("s3:ListAllMyBuckets", "*", {})
    elif not key and "lifecycle" in options:
        yield Permission(f"s3:{method.title()}LifecycleConfiguration", arn, {})
    elif not key and method == "POST" and "delete" in options:
        objects = xmltodict.parse(body)["Delete"]["Object"]
        for entry in objects if isinstance(objects, list) else [objects]:
            yield Permission("s3:DeleteObject", f"{arn}/{entry['Key']}", {})
    elif not key and method in ("GET", "HEAD"):
        yield Permission("s3:ListBucket", arn, {})
    elif not key:
        yield Permission({"PUT": "s3:CreateBucket", "DELETE": "s3:DeleteBucket"}[method], arn, {})
    elif method == "POST":  # starts or completes a multipart upload
        yield Permission("s3:PutObject", f"{arn}/{key}", {})
    elif method == "DELETE" and "uploadId" in options:
        yield Permission("s3:AbortMultipartUpload", f"{arn}/{key}", {})
    else:
        yield Permission(S3_OBJECT_ACTIONS[method], f"{arn}/{key}", {})


def refuse_foreign_bucket(account: str, path: str) -> None:
    """Raise `AwsError` if an S3 call is about the bucket of another account, because no bucket has a policy here."""
    bucket = _bucket(path.lstrip("/").partition("/")[0])
    if bucket and bucket.account_id != account:
        raise AwsError("AccessDenied", "Access Denied")


def _bucket(name: str) -> Any:
    """Return moto's bucket, or None. Names of buckets are the same for all accounts."""
    _, account = s3_backends.bucket_accounts.get(name, ("", ACCOUNT))
    return s3_backends[account]["aws"].buckets.get(name)


def _key_of_bucket(region: str, method: str, path: str) -> Iterator[Permission]:
    """Yield the permissions for the customer's key that encrypts a bucket's objects. S3 itself calls KMS."""
    name, _, key = path.lstrip("/").partition("/")
    bucket = _bucket(name)
    if key and bucket and bucket.encryption:
        rule = bucket.encryption["Rule"]["ApplyServerSideEncryptionByDefault"]
        if arn := rule.get("KMSMasterKeyID"):
            for action in S3_KEY_ACTIONS.get(method, ()):
                yield Permission(f"kms:{action}", arn, {"kms:ViaService": f"s3.{region}.amazonaws.com"})
