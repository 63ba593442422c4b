"""Who calls, and may they: signatures, and identity policies with their conditions.

moto checks actions but no conditions; here the evaluation is whole for what this project's policies use. Not modelled:
resource policies, permission boundaries, session policies and organisations.
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

from cluster.emulator.instances import ACCOUNT


@dataclass(frozen=True)
class Need:
    """One permission that a call needs; one call can need several."""

    action: str
    """Such as "ec2:RunInstances"."""
    resource: str
    """An ARN, or "*" for an action that knows no resources."""
    context: Mapping[str, str]
    """Condition keys with their values in this call."""


@dataclass(frozen=True)
class Principal:
    """Who signed a call."""

    arn: str
    statements: list[dict[str, Any]]
    """Of all its identity policies."""


class AwsError(Exception):
    """A call that AWS would refuse, with AWS's error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def authenticate(environ: Mapping[str, Any], body: bytes) -> Principal:
    """The caller, proved by the request's signature.

    Raises:
        AwsError: unsigned, signed with a key that nobody has, or not by that key's owner.
    """
    authorization = environ.get("HTTP_AUTHORIZATION", "")
    if not authorization.startswith("AWS4-HMAC-SHA256 "):
        raise AwsError("MissingAuthenticationToken", "Request is missing Authentication Token")
    fields = dict(part.strip().split("=", 1) for part in authorization.partition(" ")[2].split(","))
    key_id, *scope = fields["Credential"].split("/")
    token = environ.get("HTTP_X_AMZ_SECURITY_TOKEN")
    try:
        key = create_access_key(ACCOUNT, "aws", key_id, {"X-Amz-Security-Token": token} if token else {})
    except CreateAccessKeyFailure:
        raise AwsError("InvalidClientTokenId", "The security token included in the request is invalid.") from None
    credentials = key.create_credentials()
    if not hmac.compare_digest(_signature(environ, body, fields, scope, credentials.secret_key), fields["Signature"]):
        raise AwsError(
            "SignatureDoesNotMatch",
            "The request signature we calculated does not match the signature you provided.",
        )
    return Principal(key.arn, [one for policy in key.collect_policies() for one in _statements(policy)])


def authorize(principal: Principal, needs: Iterable[Need]) -> None:
    """Raise `AwsError` for the first need that the policies of the principal do not allow."""
    for need in needs:
        if not is_allowed(principal.statements, need):
            raise AwsError(
                "AccessDenied",
                f"User: {principal.arn} is not authorized to perform: {need.action} on resource: {need.resource} "
                f"because no identity-based policy allows the {need.action} action",
            )


def is_allowed(statements: Iterable[dict[str, Any]], need: Need) -> bool:
    """An explicit Deny wins; without an Allow there is none."""
    effects = {statement["Effect"] for statement in statements if _applies(statement, need)}
    return "Allow" in effects and "Deny" not in effects


def _applies(statement: dict[str, Any], need: Need) -> bool:
    return (
        any(_like(need.action.lower(), pattern.lower()) for pattern in _listed(statement["Action"]))
        and any(_like(need.resource, pattern) for pattern in _listed(statement["Resource"]))
        and all(
            _holds(operator, need.context.get(key), _listed(values))
            for operator, tests in statement.get("Condition", {}).items()
            for key, values in tests.items()
        )
    )


def _holds(operator: str, value: str | None, wanted: list[str]) -> bool:
    """One condition; a key that the call does not have fails it."""
    if operator == "StringEquals":
        return value in wanted
    if operator == "StringLike":
        return value is not None and any(_like(value, pattern) for pattern in wanted)
    raise NotImplementedError(f"the rehearsal does not know the condition operator {operator}; add it to iam.py")


def _like(text: str, pattern: str) -> bool:
    """IAM's wildcards are * and ?; brackets stand for themselves."""
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _statements(policy: Any) -> list[dict[str, Any]]:
    """Of a policy as moto keeps it: a role's inline one as text, a user's in a mapping, a managed one as an object."""
    if isinstance(policy, Mapping):
        policy = policy["policy_document"]
    if not isinstance(policy, str):
        policy = next(version.document for version in policy.versions if version.is_default)
    statements = json.loads(policy)["Statement"]
    return [statements] if isinstance(statements, dict) else statements


def _signature(
    environ: Mapping[str, Any], body: bytes, fields: Mapping[str, str], scope: list[str], secret: str
) -> str:
    """Return the signature that a client with this secret gives the request."""
    _, region, service, _ = scope
    signer = (S3SigV4Auth if service == "s3" else SigV4Auth)(Credentials("", secret), service, region)
    headers = {name: environ[_variable(name)] for name in fields["SignedHeaders"].split(";")}
    url = f"http://{environ['HTTP_HOST']}{environ['RAW_URI']}"
    request = AWSRequest(environ["REQUEST_METHOD"], url, headers, body)
    request.context["timestamp"] = environ["HTTP_X_AMZ_DATE"]
    return signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)


def _variable(header: str) -> str:
    """Name of a header in a WSGI environment."""
    plain = header.upper().replace("-", "_")
    return plain if plain in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{plain}"
