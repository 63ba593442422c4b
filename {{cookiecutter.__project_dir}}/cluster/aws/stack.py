"""`prepare`: what cluster.yaml stands on. One CloudFormation stack from stack.yaml, and the key pair."""

import os
import re
import time
from typing import Any

import botocore.exceptions
import requests
from pydantic import ConfigDict
from rich.console import Console

import settings
from cluster.aws import key_pair, vpc
from cluster.common import bucket
from cluster.common.cluster_file import TARGET, ClusterFile

TEMPLATE = settings.PROJECT / "cluster" / "stack.yaml"
STACK_TIMEOUT_S = 600


class ServeSection(settings.Section):
    """What of [serve] concerns the way to a served model."""

    model_config = ConfigDict(extra="ignore")
    port: int


def prepare(file: ClusterFile) -> None:
    """Make or update the stack and the key pair; nothing changes where nothing has to.

    Raises:
        settings.UserError: no network to be in, a key that is elsewhere, or a stack that AWS could not make.
    """
    section = settings.load(vpc.NetworkSection, "network", profile="cluster")
    network = vpc.find_network(file, section.vpc)
    parameters = {
        "Vpc": network.vpc,
        **{f"Subnet{number}": subnet for number, subnet in enumerate(network.subnets, 1)},
        "Caller": section.caller or f"{_own_address()}/32",
        "MakeBucket": _make_bucket(file),
        **_https(section, network),
    }
    key_pair.ensure(file)
    change = _deploy(file, parameters)
    print(f"stack {file.slug} {change}: in {', '.join(network.zones)}; port 22 is open to {parameters['Caller']} only")
    print(f"bucket: s3://{bucket.name(file)}")


def _https(section: vpc.NetworkSection, network: vpc.Network) -> dict[str, str]:
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
    return "no" if bucket.exists(file) else "yes"


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
