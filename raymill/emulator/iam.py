"""Authentication by signature, and authorization by identity policies.

moto ignores conditions. This module evaluates everything that the project's policies use. It does not model resource
policies, permission boundaries or session policies, and of organizations only policies that deny actions.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

import fnmatch
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.iam.access_control import CreateAccessKeyFailure, create_access_key
from moto.iam.models import get_account_id_from

QUERY_SERVICES = ("iam", "sts", "cloudformation")
"""Services that answer with XML, like EC2 and S3, but whose errors have a format of their own."""


@dataclass(frozen=True)
class Permission:
    """A permission that a call needs. One call can need several."""

    action: str
    """For example "ec2:RunInstances"."""
    resource: str
    """An ARN, or "*" for all resources."""
    context: Mapping[str, str]
    """Values of the condition keys in this call."""


@dataclass(frozen=True)
class Principal:
    """The user or role that calls AWS."""

    arn: str
    statements: list[dict[str, Any]]
    """Statements from all of the principal's identity policies."""

    @property
    def account(self) -> str:
        return account_of(self.arn)


class AwsError(Exception):
    """The error that AWS returns for a rejected call."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def authenticate(environ: Mapping[str, Any], body: bytes) -> Principal:
    """Check the request's signature and return the caller, who belongs to the account that has the access key.

    Raises:
        AwsError: the request is not signed, the access key does not exist, or the signature is wrong.
    """
    authorization = environ.get("HTTP_AUTHORIZATION", "")
    if not authorization.startswith("AWS4-HMAC-SHA256 "):
        raise AwsError("MissingAuthenticationToken", "Request is missing Authentication Token")
    fields = dict(part.strip().split("=", 1) for part in authorization.partition(" ")[2].split(","))
    key_id, *scope = fields["Credential"].split("/")
    token = environ.get("HTTP_X_AMZ_SECURITY_TOKEN")
    try:
        key = create_access_key(
            get_account_id_from(key_id), "aws", key_id, {"X-Amz-Security-Token": token} if token else {}
        )
    except CreateAccessKeyFailure:
        raise unknown_key(scope[2]) from None
    credentials = key.create_credentials()
    if not hmac.compare_digest(_signature(environ, body, fields, scope, credentials.secret_key), fields["Signature"]):
        raise AwsError(
            "SignatureDoesNotMatch",
            "The request signature we calculated does not match the signature you provided.",
        )
    return Principal(key.arn, [one for policy in key.collect_policies() for one in statements_of(policy)])


def account_of(arn: str) -> str:
    """Return the account in an ARN."""
    return arn.split(":")[4]


def unknown_key(service: str) -> AwsError:
    """Return the error of a service for an access key that it does not know."""
    if service == "ec2":
        return AwsError("AuthFailure", "AWS was not able to validate the provided access credentials")
    if service == "s3":
        return AwsError("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
    code = "InvalidClientTokenId" if service in QUERY_SERVICES else "UnrecognizedClient"
    return AwsError(code, "The security token included in the request is invalid.")


def authorize(principal: Principal, permissions: Iterable[Permission], organization_denies: Iterable[str] = ()) -> None:
    """Raise `AwsError` for the first permission that the principal does not have, or that its organization denies."""
    for permission in permissions:
        if any(_matches(permission.action, pattern) for pattern in organization_denies):
            raise AwsError(
                "AccessDenied",
                f"User: {principal.arn} is not authorized to perform: {permission.action} on resource: "
                f"{permission.resource} with an explicit deny in a service control policy: "
                f"arn:aws:organizations::{principal.account}:policy/o-emulated/service_control_policy/p-emulated",
            )
        if not is_allowed(principal.statements, permission):
            raise AwsError(
                "AccessDenied",
                f"User: {principal.arn} is not authorized to perform: {permission.action} on resource: "
                f"{permission.resource} because no identity-based policy allows the {permission.action} action",
            )


def use_code(code: str, used: set[str]) -> None:
    """Raise `AwsError` if a code for MFA was already used.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/id_credentials_mfa.html
    """
    if code in used:
        message = "MultiFactorAuthentication failed with invalid MFA one time pass code."
        raise AwsError("AccessDenied", message)
    used.add(code)


def is_allowed(statements: Iterable[dict[str, Any]], permission: Permission) -> bool:
    """Return whether a statement allows the permission and none denies it."""
    effects = {statement["Effect"] for statement in statements if _applies(statement, permission)}
    return "Allow" in effects and "Deny" not in effects


def _applies(statement: dict[str, Any], permission: Permission) -> bool:
    return (
        any(_matches(permission.action.lower(), pattern.lower()) for pattern in _as_list(statement["Action"]))
        and any(_matches(permission.resource, pattern) for pattern in _as_list(statement["Resource"]))
        and all(
            _holds(operator, permission.context.get(key), _as_list(values))
            for operator, tests in statement.get("Condition", {}).items()
            for key, values in tests.items()
        )
    )


def _holds(operator: str, value: str | None, expected: list[str]) -> bool:
    """Return whether a condition holds. A condition on a key that the call lacks does not hold."""
    if operator == "StringEquals":
        return value in expected
    if operator == "StringLike":
        return value is not None and any(_matches(value, pattern) for pattern in expected)
    raise NotImplementedError(
        f"the emulator does not implement the condition operator {operator}. Add it to raymill/emulator/iam.py."
    )


def _matches(text: str, pattern: str) -> bool:
    """Match IAM's wildcards * and ?. Unlike in fnmatch, brackets are literal."""
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def statements_of(policy: Any) -> list[dict[str, Any]]:
    """Return the statements of a policy.

    moto stores a role's inline policies as text, a user's as mappings, and managed policies as objects.
    """
    if isinstance(policy, Mapping):
        policy = policy["policy_document"]
    if not isinstance(policy, str):
        policy = next(version.document for version in policy.versions if version.is_default)
    statements = json.loads(policy)["Statement"]
    return [statements] if isinstance(statements, dict) else statements


def _signature(
    environ: Mapping[str, Any], body: bytes, fields: Mapping[str, str], scope: list[str], secret: str
) -> str:
    """Sign the request with a secret key, and return the signature."""
    _, region, service, _ = scope
    signer = (S3SigV4Auth if service == "s3" else SigV4Auth)(Credentials("", secret), service, region)
    headers = {name: environ[_variable(name)] for name in fields["SignedHeaders"].split(";")}
    url = f"http://{environ['HTTP_HOST']}{environ['RAW_URI']}"
    request = AWSRequest(environ["REQUEST_METHOD"], url, headers, body)
    request.context["timestamp"] = environ["HTTP_X_AMZ_DATE"]
    return signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)


def _variable(header: str) -> str:
    """Return the name that a header has in a WSGI environment."""
    plain = header.upper().replace("-", "_")
    return plain if plain in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{plain}"
