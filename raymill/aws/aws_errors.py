"""Explain errors from AWS in one line, and say what to do about the common ones."""

import re

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)

from raymill.aws import rejected_credentials
from raymill.common import cluster_file

DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError")
POLICY = re.compile(
    r"(?:because no ([\w -]+) allows the [\w:*-]+ action|with an explicit deny in an? ([\w -]+))(?:: arn:[\w:/.*-]*\w)?"
)
"""The end of a message that says which policy denies the call.

https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot_access-denied.html
"""
REMEDIES = {
    "service control policy": "Only the administrators of your AWS organization can change this policy: ask them",
    "resource control policy": "Only the administrators of your AWS organization can change this policy: ask them",
    "permissions boundary": "No other policy helps: ask the administrator of your AWS account to extend this boundary",
    "session policy": "This policy is part of your temporary credentials: use others, or ask whoever issues them",
    "VPC endpoint policy": "Ask the administrator of this machine's network, or use another network",
    "resource-based policy": "Ask the owner of the resource",
}
"""What to do, by the kind of policy that denies a call."""


def explain(error: BotoCoreError | ClientError) -> str:
    """Return what is wrong and, for common errors, what to do. If a call was denied, name the missing permission."""
    if isinstance(error, ClientError):
        return _explain_answer(error)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return "there are no complete AWS credentials on this machine. Run: aws configure   or: aws sso login"
    if isinstance(error, ProfileNotFound):
        return f"{error}. Run: unset AWS_PROFILE   or: aws configure --profile NAME"
    if isinstance(error, EndpointConnectionError):
        return f"no connection to AWS ({error}). Check the network, and region in cluster/cluster.yaml"
    return f"the request to AWS failed: {error}"


def is_missing(error: ClientError) -> bool:
    """Return whether a call failed because what it names does not exist, or does not exist any more."""
    answer = error.response["Error"]
    is_stack = answer["Code"] == "ValidationError" and "does not exist" in answer.get("Message", "")
    return bool(re.search("NotFound|NoSuch", answer["Code"])) or is_stack


def missing_permission(error: ClientError) -> str:
    """Return the denied action, such as "ec2:RunInstances" or just "RunInstances", or "" for other kinds of errors."""
    answer = error.response["Error"]
    if answer["Code"] not in DENIED:
        return ""
    named = re.search(r"not authorized to perform: ([\w-]+:\w+)", answer.get("Message", ""))
    return named[1] if named else error.operation_name


def denial(error: ClientError) -> str:
    """Return which policy denies the call and what to do, if AWS names a policy that the caller's own cannot override.

    Otherwise, return "".
    """
    message = error.response["Error"].get("Message", "")
    permission, found = missing_permission(error), POLICY.search(message)
    if not permission or not found or found[1] == "identity-based policy":
        return ""
    kind = (found[1] or found[2]).removesuffix(" type")
    remedy = REMEDIES.get(kind, "Ask the administrator of your AWS account to change this policy")
    return (
        f"a policy denies you the permission {permission}{_resource(message)} {found[0]}. {remedy}{_details(message)}"
    )


def _explain_answer(error: ClientError) -> str:
    answer = error.response["Error"]
    message = answer.get("Message", "")
    if "MultiFactorAuthentication failed" in message:
        return "AWS rejects the MFA code. Each code works once, so wait for the next one, then run the command again"
    if sentence := denial(error):
        return sentence
    if permission := missing_permission(error):
        lacking = f"you lack the permission {permission}{_resource(message)}"
        return f"{lacking}. Ask the administrator of your AWS account for it{_details(message)}"
    if rejected_credentials.is_cause(error):
        return rejected_credentials.explain(error, cluster_file.load().region)
    return f"AWS rejected {error.operation_name} ({answer['Code']}: {message})"


def _resource(message: str) -> str:
    on = re.search(r"on resource: (\S+)", message)
    return f" on {on[1]}" if on and on[1] != "*" else ""


def _details(message: str) -> str:
    """Return how to decode what EC2 adds to some denials, or ""."""
    encoded = re.search(r"Encoded authorization failure message: (\S+)", message)
    command = "aws sts decode-authorization-message --encoded-message"
    return f". For details, run: {command} {encoded[1]}" if encoded else ""
