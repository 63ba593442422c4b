"""`prepare`: what cluster.yaml stands on. One CloudFormation stack from stack.yaml, and the key pair."""

import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import boto3
import botocore.exceptions
import requests
from pydantic import ConfigDict, model_validator
from rich.console import Console

import settings
from cluster.common.cluster_file import TARGET, ClusterFile

TEMPLATE = settings.PROJECT / "cluster" / "stack.yaml"
ZONES = 3
"""As many launch templates as stack.yaml has."""
STACK_TIMEOUT_S = 600


class NetworkSection(settings.Section):
    """[cluster.network] of settings.toml."""

    vpc: str = ""
    """id of the VPC to be in; the region's default VPC when empty"""
    caller: str = ""
    """who may reach the head on port 22, as a.b.c.d/32; the address of this machine when empty"""
    certificate: str = ""
    """ARN of a certificate in ACM: a load balancer then takes HTTPS for the served model; there is none when empty"""
    clients: str = ""
    """who may reach that, as a.b.c.d/n"""

    @model_validator(mode="after")
    def _clients_are_named(self) -> Self:
        if bool(self.certificate) != bool(self.clients):
            raise ValueError("certificate and clients go together: a load balancer, and who may reach it")
        return self


class ServeSection(settings.Section):
    """What of [serve] concerns the way to a served model."""

    model_config = ConfigDict(extra="ignore")
    port: int


@dataclass(frozen=True)
class Network:
    """Where the cluster is."""

    vpc: str
    subnets: list[str]
    """One a zone, three in all; repeated where fewer zones offer what cluster.yaml asks for."""
    zones: list[str]


def prepare(file: ClusterFile) -> None:
    """Make or update the stack and the key pair; nothing changes where nothing has to.

    Raises:
        settings.UserError: no network to be in, a key that is elsewhere, or a stack that AWS could not make.
    """
    section = settings.load(NetworkSection, "network", profile="cluster")
    network = find_network(file, section.vpc)
    parameters = {
        "Vpc": network.vpc,
        **{f"Subnet{number}": subnet for number, subnet in enumerate(network.subnets, 1)},
        "Caller": section.caller or f"{_own_address()}/32",
        "MakeBucket": _make_bucket(file),
        **_https(section, network),
    }
    ensure_key_pair(file)
    change = _deploy(file, parameters)
    print(f"stack {file.slug} {change}: in {', '.join(network.zones)}; port 22 is open to {parameters['Caller']} only")
    print(f"bucket: s3://{bucket(file)}")


def _https(section: NetworkSection, network: Network) -> dict[str, str]:
    if not section.certificate:
        return {}
    if network.subnets[0] == network.subnets[1]:
        raise settings.UserError(
            "a load balancer needs two zones, and the cluster has subnets in one: take another region in "
            "cluster/cluster.yaml, or remove certificate from [cluster.network] of settings.toml."
        )
    port = settings.load(ServeSection, "serve", profile="cluster").port
    return {"Certificate": section.certificate, "Clients": section.clients, "ServePort": str(port)}


def open_https(file: ClusterFile, head: str) -> None:
    """Let the load balancer, where there is one, hand requests to the instance `head`."""
    described = find(file)
    outputs = {one["OutputKey"]: one["OutputValue"] for one in (described or {}).get("Outputs", [])}
    if "HttpsTargets" in outputs:
        targets = {"TargetGroupArn": outputs["HttpsTargets"], "Targets": [{"Id": head}]}
        file.client("elbv2").register_targets(**targets)
        print(
            f"https: {outputs['HttpsName']} takes requests for the served model, for about 20 dollars a month; "
            "make the certificate's name a CNAME of it"
        )


def find(file: ClusterFile) -> dict[str, Any] | None:
    """The stack as CloudFormation describes it; None when there is none."""
    try:
        return file.client("cloudformation").describe_stacks(StackName=file.slug)["Stacks"][0]
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] == "ValidationError":  # "does not exist"
            return None
        raise


def delete(file: ClusterFile) -> None:
    """Delete the stack and the key pair, but not the bucket. Waits until they are gone."""
    file.client("ec2").delete_key_pair(KeyName=file.slug)
    if find(file):
        file.client("cloudformation").delete_stack(StackName=file.slug)
        _wait(file, "deleting")


def bucket(file: ClusterFile) -> str:
    """Name of the project's bucket, whether it exists or not."""
    account = file.client("sts").get_caller_identity()["Account"]
    return f"{file.slug}-{account}-{file.region}"


def bucket_exists(file: ClusterFile) -> bool:
    """Whether there is a bucket to keep."""
    try:
        file.client("s3").head_bucket(Bucket=bucket(file))
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] in ("404", "NoSuchBucket"):
            return False
        raise
    return True


def access(file: ClusterFile) -> dict[str, str]:
    """What boto3 knows of the way to the bucket, for Arrow, which looks in fewer places: never for a job."""
    found = boto3.Session().get_credentials()
    assert found  # without any, nobody knows the bucket
    credentials = found.get_frozen_credentials()
    variables = {
        "AWS_DEFAULT_REGION": file.region,
        "AWS_ENDPOINT_URL_S3": file.client("s3").meta.endpoint_url,
        "AWS_ACCESS_KEY_ID": credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": credentials.secret_key,
        "AWS_SESSION_TOKEN": credentials.token,
    }
    return {name: value for name, value in variables.items() if value}


def find_network(file: ClusterFile, vpc: str) -> Network:
    """The VPC and, in each zone that offers the largest worker type, one of its subnets."""
    ec2 = file.client("ec2")
    if not vpc:
        vpcs = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
        if not vpcs:
            raise settings.UserError(
                f"{file.region} has no default VPC; name one as vpc in [cluster.network] of settings.toml, "
                "or make one: aws ec2 create-default-vpc"
            )
        vpc = vpcs[0]["VpcId"]
    instance_type = file.workers[-1].instance_type
    offered = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [instance_type]}]
    )["InstanceTypeOfferings"]
    zones = {offer["Location"] for offer in offered}
    subnets = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["Subnets"]
    by_zone = {
        subnet["AvailabilityZone"]: subnet["SubnetId"]
        for subnet in sorted(subnets, key=lambda subnet: subnet["AvailableIpAddressCount"])  # the roomiest of a zone
        if subnet["AvailabilityZone"] in zones
    }
    if not by_zone:
        raise settings.UserError(
            f"no zone of {file.region} with a subnet in {vpc} offers {instance_type}; "
            "take another region or type in cluster/cluster.yaml."
        )
    used = sorted(by_zone)[:ZONES]
    return Network(vpc=vpc, subnets=[by_zone[used[index % len(used)]] for index in range(ZONES)], zones=used)


def ensure_key_pair(file: ClusterFile) -> None:
    """The same key here and on AWS, made where neither has one.

    Raises:
        settings.UserError: AWS has a key of that name and this machine has not, or has another.
    """
    ec2 = file.client("ec2")
    on_aws = ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [file.slug]}], IncludePublicKey=True)[
        "KeyPairs"
    ]
    if not on_aws:
        if not file.key_file.exists():
            _make_key(file.key_file)
        ec2.import_key_pair(
            KeyName=file.slug,
            PublicKeyMaterial=_public_key(file.key_file).encode(),
            TagSpecifications=[{"ResourceType": "key-pair", "Tags": [{"Key": "ray-project", "Value": file.slug}]}],
        )
    elif not file.key_file.exists():
        raise settings.UserError(
            f"the cluster's private key {file.key_file} is not on this machine; copy it from where `inv up` ran, "
            f"or end that cluster: inv down --target {TARGET}"
        )
    elif (theirs := on_aws[0].get("PublicKey")) and theirs.split()[:2] != _public_key(file.key_file).split()[:2]:
        raise settings.UserError(
            f"{file.key_file} is not the private key of the key pair {file.slug} on AWS; move it away and copy the "
            f"right one there, or end that cluster: inv down --target {TARGET}"
        )


def _make_key(file: Path) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", file.stem, "-f", file], check=True)
    file.with_name(f"{file.name}.pub").unlink()  # ssh-keygen -y tells it at any time


def _public_key(file: Path) -> str:
    shown = subprocess.run(["ssh-keygen", "-y", "-f", file], capture_output=True, text=True)
    if shown.returncode:
        raise settings.UserError(f"{file} is not a private key that ssh-keygen reads ({shown.stderr.strip()}).")
    return shown.stdout


def _own_address() -> str:
    """The address by which AWS sees this machine, told by AWS."""
    url = os.environ.get("CALLER_ADDRESS_URL", "https://checkip.amazonaws.com")  # the rehearsal has its own
    try:
        response = requests.get(url, timeout=10)
        response.raise_for_status()
        return response.text.strip()
    except requests.RequestException as error:
        raise settings.UserError(
            f"{url} did not say this machine's address ({error}); "
            'set it as caller = "a.b.c.d/32" in [cluster.network] of settings.toml.'
        ) from None


def _make_bucket(file: ClusterFile) -> str:
    """Whether the stack makes the bucket: not where an earlier stack left it, which this one cannot take over."""
    if stack := find(file):
        return next(p["ParameterValue"] for p in stack["Parameters"] if p["ParameterKey"] == "MakeBucket")
    return "no" if bucket_exists(file) else "yes"


def _deploy(file: ClusterFile, parameters: dict[str, str]) -> str:
    """Create or update; returns which, in a word."""
    cloudformation = file.client("cloudformation")
    request = {
        "StackName": file.slug,
        "TemplateBody": TEMPLATE.read_text(encoding="utf-8"),
        "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
        "Capabilities": ["CAPABILITY_NAMED_IAM"],
        "Tags": [{"Key": "ray-project", "Value": file.slug}],
    }
    stack = find(file)
    if stack and stack["StackStatus"] in ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED"):
        delete(file)  # such a stack holds nothing and cannot be updated
        stack = None
    if stack is None:
        cloudformation.create_stack(**request, OnFailure="DELETE")
        _wait(file, "making")
        return "made"
    try:
        cloudformation.update_stack(**request)
    except botocore.exceptions.ClientError as error:
        if "No updates are to be performed" in error.response["Error"]["Message"]:
            return "is as it should be"
        raise
    _wait(file, "updating")
    return "updated"


def _wait(file: ClusterFile, doing: str) -> None:
    """Until the stack has settled. Raises `settings.UserError` with AWS's first reason when that failed."""
    started = time.monotonic()
    stack = find(file)
    identity = stack["StackId"] if stack else ""
    with Console().status(f"{doing} the stack {file.slug}") as spinner:
        while (stack := find(file)) and stack["StackStatus"].endswith("_IN_PROGRESS"):
            waited = time.monotonic() - started
            if waited > STACK_TIMEOUT_S:
                raise settings.UserError(
                    f"the stack {file.slug} is still {stack['StackStatus']} after {waited:.0f} s; "
                    f"look again with: inv prepare --target {TARGET}"
                )
            spinner.update(f"{doing} the stack {file.slug}: {waited:.0f} s")
            time.sleep(2)
    failed = stack is not None and re.search("ROLLBACK|FAILED", stack["StackStatus"])
    if failed or (stack is None) != (doing == "deleting"):
        raise settings.UserError(f"AWS could not finish {doing} the stack {file.slug}: {_reason(file, identity)}")


def _reason(file: ClusterFile, stack_id: str) -> str:
    events = file.client("cloudformation").describe_stack_events(StackName=stack_id)["StackEvents"]
    failed = [event for event in reversed(events) if event["ResourceStatus"].endswith("_FAILED")]
    if not failed:
        return f"look at it with: aws cloudformation describe-stack-events --stack-name {file.slug}"
    return f"{failed[0]['LogicalResourceId']}: {failed[0].get('ResourceStatusReason', 'no reason given')}"
