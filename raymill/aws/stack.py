"""Create, update, find and delete the CloudFormation stack that cluster/stack.yaml describes."""

import itertools
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import botocore.exceptions
import yaml

from raymill import settings
from raymill.aws import caller
from raymill.common.cluster_file import ClusterFile, target
from raymill.console import Console
from raymill.errors import UserError

TEMPLATE = settings.PROJECT / "cluster" / "stack.yaml"
STACK_TIMEOUT_S = 600
POLL_S = 2
DELETE_ATTEMPTS = 3
UNUSABLE = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED")
"""States of a stack that cannot be updated, only deleted. UPDATE_ROLLBACK_COMPLETE is none of them: an earlier update
failed, and the next one can succeed."""
STARTED = "User Initiated"
"""Reason of the event with which an operation starts."""


class OperationFailed(UserError):
    """AWS could not create, update or delete the stack."""


def find(file: ClusterFile) -> dict[str, Any] | None:
    """Return CloudFormation's description of the stack, or None if there is no stack."""
    try:
        return file.client("cloudformation").describe_stacks(StackName=file.slug)["Stacks"][0]
    except botocore.exceptions.ClientError as error:
        if "does not exist" in error.response["Error"]["Message"]:
            return None
        raise


def parameters(file: ClusterFile) -> dict[str, str]:
    """Return the parameters of the existing stack, or {} if there is none that can be updated."""
    stack = find(file)
    if stack is None or stack["StackStatus"] in UNUSABLE:
        return {}
    return {one["ParameterKey"]: one["ParameterValue"] for one in stack.get("Parameters", [])}


def deploy(
    file: ClusterFile, parameters: dict[str, str], efa_cards: int, more_callers: Sequence[str] = (), *, owner: str
) -> str:
    """Create or update the stack. Return "created", "updated" or "is up to date".

    `efa_cards` is the number of network cards of a GPU instance that use EFA. `more_callers` are the addresses that may
    connect to port 22 besides the parameter `Caller`. A new stack gets a tag with its owner. If another operation
    changes the stack, this waits for its end.

    Raises:
        UserError: it fails (the message contains the first reason from AWS), takes over ten minutes, or the
            stack is stuck in a state that only its owner can resolve.
    """
    request = {
        "TemplateBody": body(efa_cards, more_callers, makes_network=not parameters["Vpc"]),
        "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
        "Capabilities": ["CAPABILITY_NAMED_IAM"],
    }
    deadline = time.monotonic() + STACK_TIMEOUT_S
    while True:
        try:
            return _create_or_update(file, request, owner)
        except botocore.exceptions.ClientError as error:
            if not _is_race(error) or time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)  # somebody else changed the stack after it was looked up


def _create_or_update(file: ClusterFile, request: dict[str, Any], owner: str) -> str:
    cloudformation = file.client("cloudformation")
    stack = when_idle(file)
    if stack and stack["StackStatus"] == "UPDATE_ROLLBACK_FAILED":
        # AWS's way to make the stack usable: https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/
        # using-cfn-updating-stacks-continueupdaterollback.html
        cloudformation.continue_update_rollback(StackName=stack["StackId"])
        _wait(file, stack["StackId"], "continuing the rollback of", end="UPDATE_ROLLBACK_COMPLETE")
    elif stack and stack["StackStatus"] in UNUSABLE:
        delete(file)
        stack = None
    elif stack and stack["StackStatus"] == "IMPORT_ROLLBACK_FAILED":
        raise UserError(
            f"the stack {file.slug} is {stack['StackStatus']}, so it cannot be updated. Run: "
            f"inv down --target {target()}"
        )
    request |= {"Tags": _tags(file, stack, owner)}
    if stack is None:
        made = cloudformation.create_stack(StackName=file.slug, **request, OnFailure="DELETE")
        _wait(file, made["StackId"], "creating", end="CREATE_COMPLETE")
        return "created"
    try:
        cloudformation.update_stack(StackName=stack["StackId"], **request)
    except botocore.exceptions.ClientError as error:
        if "No updates are to be performed" in error.response["Error"]["Message"]:
            return "is up to date"
        raise
    _wait(file, stack["StackId"], "updating", end="UPDATE_COMPLETE")
    return "updated"


def check_name(file: ClusterFile) -> None:
    """Raise `UserError` if stack.yaml has another name in its tags, by which `down` finds what is left."""
    resources = parse(TEMPLATE.read_text(encoding="utf-8"))["Resources"]
    for name, resource in resources.items():
        for tag in resource["Properties"].get("Tags", []):
            if tag["Key"] == "ray-project" and tag["Value"] != file.slug:
                raise UserError(
                    f"{name} in cluster/stack.yaml has the tag ray-project: {tag['Value']}, but cluster_name is "
                    f"{file.slug} in cluster/cluster.yaml. Write the same name in all places of both files"
                )


def _tags(file: ClusterFile, stack: dict[str, Any] | None, owner: str) -> list[dict[str, str]]:
    """Return the tags of the stack. An update keeps those that it has: its owner, and tags of an administrator.

    It adds none, because a new tag of the stack replaces its placement groups, in which workers may run. AWS accepts no
    tags with its own prefix.
    https://docs.aws.amazon.com/AWSCloudFormation/latest/APIReference/API_Tag.html
    """
    kept = stack.get("Tags", []) if stack else [{"Key": caller.OWNER_TAG, "Value": owner}]
    tags = {tag["Key"]: tag["Value"] for tag in kept if not tag["Key"].startswith("aws:")} | {"ray-project": file.slug}
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _is_race(error: botocore.exceptions.ClientError) -> bool:
    """Return whether AWS refused a call because another operation has started, or has just created the stack."""
    answer = error.response["Error"]
    return bool(re.search(r"_IN_PROGRESS|^Stack .*(already exists|does not exist)", answer["Message"]))


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


class _Loader(yaml.CSafeLoader):
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
    """Delete the stack, but not the bucket, and wait until the stack is gone.

    AWS can fail to delete a resource that something else still uses, such as a network interface that it frees late.
    """
    for attempt in range(1, DELETE_ATTEMPTS + 1):
        if not (stack := when_idle(file)):
            return
        try:
            file.client("cloudformation").delete_stack(StackName=stack["StackId"])
            _wait(file, stack["StackId"], "deleting", end="DELETE_COMPLETE")
        except botocore.exceptions.ClientError as error:
            if not _is_race(error):
                raise
        except OperationFailed:
            if attempt == DELETE_ATTEMPTS:
                raise
        else:
            return
        time.sleep(POLL_S)


def when_idle(file: ClusterFile) -> dict[str, Any] | None:
    """Wait until no operation changes the stack. Return its description, or None if there is none.

    Raises:
        UserError: the operation takes over ten minutes, or somebody must first decide about the stack.
    """
    stack = find(file)
    if stack and stack["StackStatus"] == "REVIEW_IN_PROGRESS":
        raise UserError(
            f"a change set that nobody has executed holds the name of the stack {file.slug}. Execute it, or run: "
            f"aws cloudformation delete-stack --stack-name {file.slug} --region {file.region}"
        )
    if stack and stack["StackStatus"].endswith("_IN_PROGRESS"):
        _follow(file, stack["StackId"], "waiting for another operation on")
        return find(file)
    return stack


def _wait(file: ClusterFile, stack_id: str, action: str, *, end: str) -> None:
    """Wait until the operation that has just started ends. Raises `OperationFailed` unless the stack is then `end`.

    The id, not the name, finds a stack that has been deleted, and no stack that somebody has made since.
    """
    if (status := _follow(file, stack_id, action)) != end:
        advice = f". Run: inv down --target {target()}" if status == "UPDATE_ROLLBACK_FAILED" else ""
        reason = _failure_reason(file, stack_id)
        raise OperationFailed(f"{action} the stack {file.slug} failed: {reason.removesuffix('.')}{advice}")


def _follow(file: ClusterFile, stack_id: str, action: str) -> str:
    """Wait until the stack is not busy, and return its state. Raises `UserError` after ten minutes."""
    cloudformation, started = file.client("cloudformation"), time.monotonic()
    with Console().status(f"{action} the stack {file.slug}") as spinner:
        while True:
            status = cloudformation.describe_stacks(StackName=stack_id)["Stacks"][0]["StackStatus"]
            if not status.endswith("_IN_PROGRESS"):
                return status
            waited = time.monotonic() - started
            if waited > STACK_TIMEOUT_S:
                raise UserError(
                    f"the stack {file.slug} is still {status} after {waited:.0f} s. Run the command again later"
                )
            spinner.update(f"{action} the stack {file.slug}: {waited:.0f} s")
            time.sleep(POLL_S)


def _failure_reason(file: ClusterFile, stack_id: str) -> str:
    """Return the first reason since the latest operation started. Older events are about earlier operations."""
    pages = file.client("cloudformation").get_paginator("describe_stack_events").paginate(StackName=stack_id)
    newest_first = (event for page in pages for event in page["StackEvents"])
    latest = itertools.takewhile(lambda event: event.get("ResourceStatusReason") != STARTED, newest_first)
    failed = [event for event in latest if event["ResourceStatus"].endswith("_FAILED")]
    if not failed:
        show = f"aws cloudformation describe-stack-events --stack-name {stack_id} --region {file.region}"
        return f"another operation ended it. Run: {show}"
    return f"{failed[-1]['LogicalResourceId']}: {failed[-1].get('ResourceStatusReason', 'no reason given')}"
