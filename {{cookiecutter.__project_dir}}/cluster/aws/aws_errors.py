"""What AWS's refusals mean, in one sentence for a person."""

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
NO_LONGER_KNOWN = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidClientTokenId", "AuthFailure")


def explain(error: BotoCoreError | ClientError) -> str:
    """What is wrong and what to do about it; a denied call names the permission that is missing."""
    if isinstance(error, ClientError):
        return _explain_answer(error)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return "there are no AWS credentials here; give some with: aws configure   or: aws sso login"
    if isinstance(error, ProfileNotFound):
        return f"{error}; unset AWS_PROFILE, or make it with: aws configure --profile NAME"
    if isinstance(error, EndpointConnectionError):
        return f"AWS is not reached ({error}); try again when the network is back."
    return f"AWS could not be asked: {error}"


def missing_permission(error: ClientError) -> str:
    """The action that the caller may not do, such as "ec2:RunInstances"; empty for any other error."""
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
        return f"you may not {permission}{where}; ask whoever manages your AWS account for that permission."
    if answer["Code"] in NO_LONGER_KNOWN:
        return f"AWS does not know these credentials ({answer['Code']}); renew them: aws configure   or: aws sso login"
    return f"AWS refused {error.operation_name} ({answer['Code']}: {answer.get('Message', '')})"
