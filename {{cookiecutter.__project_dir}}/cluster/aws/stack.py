"""Create, update, find and delete the CloudFormation stack that cluster/stack.yaml describes."""

import re
import time
from typing import Any

import botocore.exceptions
from rich.console import Console

import settings
from cluster.common.cluster_file import TARGET, ClusterFile

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


def deploy(file: ClusterFile, parameters: dict[str, str]) -> str:
    """Create or update the stack. Return "created", "updated" or "is up to date".

    Raises:
        settings.UserError: it fails (the message contains the first reason from AWS) or takes over ten minutes.
    """
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
