"""What each call of AWS's API needs to be allowed: actions, resources and condition keys, as the service
authorization reference lists them.

Calls that are not listed need their action on "*", which only a policy for all resources gives.
https://docs.aws.amazon.com/service-authorization/latest/reference/reference_policies_actions-resources-contextkeys.html
"""

import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import xmltodict
from moto.ec2.models import ec2_backends
from moto.secretsmanager.models import secretsmanager_backends

from cluster.emulator.iam import Need
from cluster.emulator.instances import ACCOUNT

# Names of EC2's resources in ARNs, by the prefix of their ids.
EC2_KINDS = {"i": "instance", "vol": "volume", "eni": "network-interface", "key": "key-pair"}
S3_OBJECT_ACTIONS = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "PUT": "s3:PutObject", "DELETE": "s3:DeleteObject"}
RESOLVE = "resolve:ssm:"


def of(service: str, action: str, region: str, parameters: dict[str, Any], http: dict[str, Any]) -> list[Need]:
    """The needs of one call. `http` has its method, path, query and body, which decide for S3."""
    if (service, action) == ("sts", "GetCallerIdentity"):
        return []  # allowed to everybody, whatever a policy says
    if service == "s3":
        return list(_s3(**http))
    if service == "ec2" and action == "RunInstances":
        return list(_run_instances(region, parameters))
    if service == "ec2" and action in ("CreateTags", "TerminateInstances"):
        return list(_on_tagged(action, region, parameters))
    if service == "ssm" and action.startswith("GetParameter"):
        names = parameters.get("Names") or [parameters.get("Name") or parameters.get("Path", "")]
        return [Need(f"ssm:{action}", _parameter_arn(region, name), {}) for name in names]
    if service == "secretsmanager" and action == "GetSecretValue":
        return [Need("secretsmanager:GetSecretValue", _secret_arn(region, parameters["SecretId"]), {})]
    return [Need(f"{service}:{action}", "*", {})]


def _run_instances(region: str, parameters: dict[str, str]) -> Iterator[Need]:
    arn = f"arn:aws:ec2:{region}:{ACCOUNT}:"
    made = {"instance", "volume", "network-interface"}
    tags = _tag_specifications(parameters)
    for kind in sorted(made):
        yield Need(
            "ec2:RunInstances", f"{arn}{kind}/*", {f"aws:RequestTag/{k}": v for k, v in tags.get(kind, {}).items()}
        )
    for kind in tags:
        yield Need("ec2:CreateTags", f"{arn}{kind}/*", {"ec2:CreateAction": "RunInstances"})
    if parameters.get("InstanceMarketOptions.MarketType") == "spot":
        yield Need("ec2:RunInstances", f"{arn}spot-instances-request/*", {})
    image = parameters["ImageId"]
    if image.startswith(RESOLVE):
        yield Need("ssm:GetParameters", _parameter_arn(region, image.removeprefix(RESOLVE)), {})
    yield Need("ec2:RunInstances", f"arn:aws:ec2:{region}::image/ami-any", {})
    yield from (Need("ec2:RunInstances", used, {}) for used in _used_by_launch(region, arn, parameters))
    if profile := parameters.get("IamInstanceProfile.Name"):
        passed = f"arn:aws:iam::{ACCOUNT}:role/{profile}"  # role and profile have one name in stack.yaml
        yield Need("iam:PassRole", passed, {"iam:PassedToService": "ec2.amazonaws.com"})


def _used_by_launch(region: str, arn: str, parameters: dict[str, str]) -> Iterator[str]:
    """ARNs of what a launch uses and does not make."""
    for key, value in parameters.items():
        if re.fullmatch(r"(NetworkInterface\.\d+\.)?SubnetId", key):
            yield f"{arn}subnet/{value}"
        elif re.fullmatch(r"(NetworkInterface\.\d+\.)?SecurityGroupId\.\d+", key):
            yield f"{arn}security-group/{value}"
    if name := parameters.get("KeyName"):
        yield f"{arn}key-pair/{name}"
    if name := parameters.get("LaunchTemplate.LaunchTemplateName"):
        templates = ec2_backends[ACCOUNT][region].launch_templates.values()
        yield from (f"{arn}launch-template/{one.id}" for one in templates if one.name == name)


def _tag_specifications(parameters: dict[str, str]) -> dict[str, dict[str, str]]:
    """Tags by the kind of resource that the call puts them on."""
    tags: dict[str, dict[str, str]] = {}
    for key, kind in parameters.items():
        if found := re.fullmatch(r"TagSpecification\.(\d+)\.ResourceType", key):
            prefix = f"TagSpecification.{found[1]}.Tag."
            numbers = {name.split(".")[3] for name in parameters if name.startswith(prefix)}
            tags[kind] = {parameters[f"{prefix}{n}.Key"]: parameters[f"{prefix}{n}.Value"] for n in numbers}
    return tags


def _on_tagged(action: str, region: str, parameters: dict[str, str]) -> Iterator[Need]:
    """An action on instances and the like, each with the tags that it has."""
    backend = ec2_backends[ACCOUNT][region]
    for key, identity in parameters.items():
        if re.fullmatch(r"(InstanceId|ResourceId)\.\d+", key):
            kind = EC2_KINDS.get(identity.partition("-")[0], "*")
            context = {f"aws:ResourceTag/{k}": v for k, v in backend.tags.get(identity, {}).items()}
            yield Need(f"ec2:{action}", f"arn:aws:ec2:{region}:{ACCOUNT}:{kind}/{identity}", context)


def _parameter_arn(region: str, name: str) -> str:
    owner = "" if name.startswith("/aws/") else ACCOUNT  # public parameters are nobody's
    return f"arn:aws:ssm:{region}:{owner}:parameter/{name.lstrip('/')}"


def _secret_arn(region: str, identity: str) -> str:
    """A secret's ARN ends with random letters, which policies have to allow for; one that is not there gets some."""
    backend = secretsmanager_backends[ACCOUNT][region]
    known = backend.secrets.get(identity) if backend.secrets.get(identity) else None
    return known.arn if known else f"arn:aws:secretsmanager:{region}:{ACCOUNT}:secret:{identity}-AbCdEf"


def _s3(method: str, path: str, query: str, body: bytes) -> Iterator[Need]:
    bucket, _, key = urllib.parse.unquote(path).lstrip("/").partition("/")
    arn = f"arn:aws:s3:::{bucket}"
    asked = urllib.parse.parse_qs(query, keep_blank_values=True)
    if not bucket:
        yield Need("s3:ListAllMyBuckets", "*", {})
    elif not key and method == "POST" and "delete" in asked:
        objects = xmltodict.parse(body)["Delete"]["Object"]
        for entry in objects if isinstance(objects, list) else [objects]:
            yield Need("s3:DeleteObject", f"{arn}/{entry['Key']}", {})
    elif not key and method in ("GET", "HEAD"):
        yield Need("s3:ListBucket", arn, {})
    elif not key:
        yield Need({"PUT": "s3:CreateBucket", "DELETE": "s3:DeleteBucket"}[method], arn, {})
    elif method == "POST":  # the steps of a multipart upload
        yield Need("s3:PutObject", f"{arn}/{key}", {})
    elif method == "DELETE" and "uploadId" in asked:
        yield Need("s3:AbortMultipartUpload", f"{arn}/{key}", {})
    else:
        yield Need(S3_OBJECT_ACTIONS[method], f"{arn}/{key}", {})
