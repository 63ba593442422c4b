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

DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError")
INVALID_CREDENTIALS = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidClientTokenId", "AuthFailure")


def explain(error: BotoCoreError | ClientError) -> str:
    """Return what is wrong and, for common errors, what to do. If a call was denied, name the missing permission."""
    if isinstance(error, ClientError):
        return _explain_answer(error)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return "there are no complete AWS credentials on this machine. Run: aws configure   or: aws sso login"
    if isinstance(error, ProfileNotFound):
        return f"{error}. Run: unset AWS_PROFILE   or: aws configure --profile NAME"
    if isinstance(error, EndpointConnectionError):
        return f"no connection to AWS ({error}). Check the network, then try again"
    return f"the request to AWS failed: {error}"


def is_missing(error: ClientError) -> bool:
    """Return whether a call failed because what it names does not exist, or does not exist any more."""
    answer = error.response["Error"]
    return bool(re.search("NotFound|NoSuch", answer["Code"])) or "does not exist" in answer.get("Message", "")


def missing_permission(error: ClientError) -> str:
    """Return the denied action, such as "ec2:RunInstances" or just "RunInstances", or "" for other kinds of errors."""
    answer = error.response["Error"]
    if answer["Code"] not in DENIED:
        return ""
    named = re.search(r"not authorized to perform: ([\w-]+:\w+)", answer.get("Message", ""))
    return named[1] if named else error.operation_name


def _explain_answer(error: ClientError) -> str:
    answer = error.response["Error"]
    if permission := missing_permission(error):
        on = re.search(r"on resource: (\S+)", answer.get("Message", ""))
        where = f" on {on[1]}" if on and on[1] != "*" else ""
        return f"you lack the permission {permission}{where}. Ask the administrator of your AWS account for it"
    if answer["Code"] in INVALID_CREDENTIALS:
        return f"AWS rejects your credentials ({answer['Code']}). Run: aws configure   or: aws sso login"
    return f"AWS rejected {error.operation_name} ({answer['Code']}: {answer.get('Message', '')})"
