"""Create, update, find and delete the CloudFormation stack that cluster/stack.yaml describes."""

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import botocore.exceptions
import yaml

import settings
from cluster.aws import caller
from cluster.common.cluster_file import TARGET, ClusterFile
from cluster.console import Console

TEMPLATE = settings.PROJECT / "cluster" / "stack.yaml"
STACK_TIMEOUT_S = 600


def find(file: ClusterFile) -> dict[str, Any] | None:
    """Return CloudFormation's description of the stack, or None if there is no stack."""
    try:
        return file.client("cloudformation").describe_stacks(StackName=file.slug)["Stacks"][0]
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] == "ValidationError":  # "does not exist"
            return None
        raise


def deploy(file: ClusterFile, parameters: dict[str, str], efa_cards: int, more_callers: Sequence[str] = ()) -> str:
    """Create or update the stack. Return "created", "updated" or "is up to date".

    `efa_cards` is the number of network cards of a GPU instance that use EFA. `more_callers` are the addresses that may
    connect to port 22 besides the parameter `Caller`.

    Raises:
        settings.UserError: it fails (the message contains the first reason from AWS) or takes over ten minutes.
    """
    cloudformation = file.client("cloudformation")
    request = {
        "StackName": file.slug,
        "TemplateBody": body(efa_cards, more_callers, makes_network=not parameters["Vpc"]),
        "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
        "Capabilities": ["CAPABILITY_NAMED_IAM"],
    }
    stack = find(file)
    request["Tags"] = _tags(file, stack)
    if stack and stack["StackStatus"] in ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED"):
        delete(file)  # such a stack cannot be updated
        stack = None
    if stack is None:
        cloudformation.create_stack(**request, OnFailure="DELETE")
        _wait(file, "creating")
        return "created"
    try:
        cloudformation.update_stack(**request)
    except botocore.exceptions.ClientError as error:
        if "No updates are to be performed" in error.response["Error"]["Message"]:
            return "is up to date"
        raise
    _wait(file, "updating")
    return "updated"


def check_name(file: ClusterFile) -> None:
    """Raise `settings.UserError` if stack.yaml has another name in its tags, by which `down` finds what is left."""
    resources = parse(TEMPLATE.read_text(encoding="utf-8"))["Resources"]
    for name, resource in resources.items():
        for tag in resource["Properties"].get("Tags", []):
            if tag["Key"] == "ray-project" and tag["Value"] != file.slug:
                raise settings.UserError(
                    f"{name} in cluster/stack.yaml has the tag ray-project: {tag['Value']}, but cluster_name is "
                    f"{file.slug} in cluster/cluster.yaml. Write the same name in all places of both files"
                )


def _tags(file: ClusterFile, stack: dict[str, Any] | None) -> list[dict[str, str]]:
    """Return the tags of the stack. An update keeps those that it has: its owner, and tags of an administrator.

    AWS accepts no tags with its own prefix.
    https://docs.aws.amazon.com/AWSCloudFormation/latest/APIReference/API_Tag.html
    """
    tags = {tag["Key"]: tag["Value"] for tag in (stack or {}).get("Tags", []) if not tag["Key"].startswith("aws:")}
    mine = caller.owner_tag(file)
    tags = {mine["Key"]: mine["Value"], **tags, "ray-project": file.slug}
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def body(efa_cards: int, more_callers: Sequence[str] = (), *, makes_network: bool) -> str:
    """Return the template as JSON, of which CloudFormation accepts 51,200 bytes."""
    return json.dumps(template(efa_cards, more_callers, makes_network=makes_network), separators=(",", ":"))


def template(efa_cards: int, more_callers: Sequence[str] = (), *, makes_network: bool) -> dict[str, Any]:
    """Return stack.yaml with a network interface for each EFA card after the first, on all GPU launch templates.

    It also has a rule for port 22 for each of `more_callers`. CloudFormation's own language has no loop that makes
    items of a list. An efa-only interface carries no IP traffic.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html

    `makes_network` says whether the stack makes a VPC.
    """
    content = parse(TEMPLATE.read_text(encoding="utf-8"))
    launches = [one["Properties"].get("LaunchTemplateData", {}) for one in content["Resources"].values()]
    found = [launch["NetworkInterfaces"] for launch in launches if "NetworkInterfaces" in launch]
    for interfaces in (one for one in found if "NetworkCardIndex" in one[0]):
        shared = {key: interfaces[0][key] for key in ("Groups", "DeleteOnTermination")}
        shared["SubnetId"] = _choose(interfaces[0]["SubnetId"], makes_network)  # short, because there may be 32 cards
        interfaces += [
            {"DeviceIndex": 1, "NetworkCardIndex": card, "InterfaceType": "efa-only", **shared}
            for card in range(1, efa_cards)
        ]
    rules = content["Resources"]["Group"]["Properties"]["SecurityGroupIngress"]
    for rule in [one for one in rules if one["CidrIp"] == {"Ref": "Caller"}]:
        rules += [rule | {"CidrIp": caller} for caller in more_callers]
    return content


def _choose(value: dict[str, Any], holds: bool) -> dict[str, Any]:
    """Return the value that Fn::If has if all conditions hold, or if none does."""
    while "Fn::If" in value:
        value = value["Fn::If"][1 if holds else 2]
    return value


def parse(text: str) -> dict[str, Any]:
    """Return a CloudFormation template in the long forms that its JSON has."""
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """Reads CloudFormation's short forms, such as !Ref, as the long forms that its JSON has."""


def _long_form(loader: _Loader, tag: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        value = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        raise yaml.constructor.ConstructorError(None, None, f"!{tag} has a mapping", node.start_mark)
    if tag == "GetAtt" and isinstance(value, str):
        value = value.split(".", 1)
    return {tag if tag in ("Ref", "Condition") else f"Fn::{tag}": value}


_Loader.add_multi_constructor("!", _long_form)


def delete(file: ClusterFile) -> None:
    """Delete the stack, but not the bucket, and wait until the stack is gone."""
    if find(file):
        file.client("cloudformation").delete_stack(StackName=file.slug)
        _wait(file, "deleting")


def _wait(file: ClusterFile, action: str) -> None:
    """Wait until the operation on the stack ends. Raises `settings.UserError` if it fails or takes over ten minutes."""
    started = time.monotonic()
    stack = find(file)
    stack_id = stack["StackId"] if stack else ""
    with Console().status(f"{action} the stack {file.slug}") as spinner:
        while (stack := find(file)) and stack["StackStatus"].endswith("_IN_PROGRESS"):
            waited = time.monotonic() - started
            if waited > STACK_TIMEOUT_S:
                raise settings.UserError(
                    f"the stack {file.slug} is still {stack['StackStatus']} after {waited:.0f} s. "
                    f"Run: inv {'down' if action == 'deleting' else 'prepare'} --target {TARGET}"
                )
            spinner.update(f"{action} the stack {file.slug}: {waited:.0f} s")
            time.sleep(2)
    failed = stack is not None and re.search("ROLLBACK|FAILED", stack["StackStatus"])
    if failed or (stack is None) != (action == "deleting"):
        raise settings.UserError(f"{action} the stack {file.slug} failed: {_failure_reason(file, stack_id)}")


def _failure_reason(file: ClusterFile, stack_id: str) -> str:
    events = file.client("cloudformation").describe_stack_events(StackName=stack_id)["StackEvents"]
    failed = [event for event in reversed(events) if event["ResourceStatus"].endswith("_FAILED")]
    if not failed:
        return f"AWS gives no reason. Run: aws cloudformation describe-stack-events --stack-name {file.slug}"
    return f"{failed[0]['LogicalResourceId']}: {failed[0].get('ResourceStatusReason', 'no reason given')}"
