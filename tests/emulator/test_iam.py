"""Test the emulator's IAM: signatures, policies, and the permissions that calls need."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto import mock_aws
from moto.iam.models import iam_backends

from raymill.emulator import iam, permissions
from raymill.emulator.moto_instances import ACCOUNT

BUCKET = "arn:aws:s3:::bucket"
TAGGED = {
    "Effect": "Allow",
    "Action": "ec2:TerminateInstances",
    "Resource": "arn:aws:ec2:us-east-1:123456789012:instance/*",
    "Condition": {"StringEquals": {"aws:ResourceTag/ray-project": "mine"}},
}


def permission(action: str, resource: str = "*", **context: str) -> iam.Permission:
    return iam.Permission(action, resource, context)


def test_without_an_allow_everything_is_denied() -> None:
    assert not iam.is_allowed([], permission("ec2:DescribeInstances"))


def test_an_explicit_deny_wins() -> None:
    allow = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    deny = {"Effect": "Deny", "Action": "s3:DeleteObject", "Resource": f"{BUCKET}/*"}
    assert iam.is_allowed([allow, deny], permission("s3:GetObject", f"{BUCKET}/a"))
    assert not iam.is_allowed([allow, deny], permission("s3:DeleteObject", f"{BUCKET}/a"))


def test_wildcards_match_and_only_resources_are_case_sensitive() -> None:
    statement = {"Effect": "Allow", "Action": ["s3:get*"], "Resource": [f"{BUCKET}/runs/?/*"]}
    assert iam.is_allowed([statement], permission("s3:GetObject", f"{BUCKET}/runs/1/model"))
    assert not iam.is_allowed([statement], permission("s3:GetObject", f"{BUCKET}/runs/12/model"))
    assert not iam.is_allowed([statement], permission("s3:GetObject", f"{BUCKET.upper()}/runs/1/model"))


def test_a_condition_requires_its_value() -> None:
    instance = "arn:aws:ec2:us-east-1:123456789012:instance/i-1"
    mine, other = {"aws:ResourceTag/ray-project": "mine"}, {"aws:ResourceTag/ray-project": "other"}
    assert iam.is_allowed([TAGGED], iam.Permission("ec2:TerminateInstances", instance, mine))
    assert not iam.is_allowed([TAGGED], iam.Permission("ec2:TerminateInstances", instance, other))
    assert not iam.is_allowed([TAGGED], iam.Permission("ec2:TerminateInstances", instance, {}))


def test_an_unknown_condition_operator_raises() -> None:
    statement = TAGGED | {"Condition": {"NumericLessThan": {"a": "1"}}}
    instance = "arn:aws:ec2:us-east-1:123456789012:instance/i-1"
    with pytest.raises(NotImplementedError, match="NumericLessThan"):
        iam.is_allowed([statement], permission("ec2:TerminateInstances", instance))


def test_a_denial_names_caller_action_and_resource() -> None:
    with pytest.raises(iam.AwsError, match=r"user/me is not authorized .*: s3:GetObject on resource: .*bucket/a"):
        iam.authorize(iam.Principal("arn:aws:iam::1:user/me", []), [permission("s3:GetObject", f"{BUCKET}/a")])


@pytest.fixture
def key() -> Iterator[Credentials]:
    """Create a user with an access key, and delete both afterwards."""
    backend = iam_backends[ACCOUNT]["aws"]
    backend.create_user(region_name="us-east-1", user_name="me")
    created = backend.create_access_key(user_name="me")
    yield Credentials(created.access_key_id, created.secret_access_key)
    backend.delete_access_key(created.access_key_id, "me")
    backend.delete_user("me")


def signed(key: Credentials, service: str, url: str, body: bytes) -> dict[str, str]:
    """Return the WSGI environment of a signed request."""
    request = AWSRequest("PUT", url, {"Host": urlsplit(url).netloc, "Content-Type": "text/plain; a=b"}, body)
    (S3SigV4Auth if service == "s3" else SigV4Auth)(key, service, "us-east-1").add_auth(request)
    environ = {iam._variable(name): value for name, value in request.headers.items()}
    return environ | {"REQUEST_METHOD": "PUT", "RAW_URI": url.removeprefix(f"http://{urlsplit(url).netloc}")}


@pytest.mark.parametrize("service", ["s3", "ec2"])
@pytest.mark.parametrize(
    "path", ["/", "/bucket/a%20b/%C3%A9//c?prefix=x%2Fy&list-type=2&empty=", "/bucket/a+b?b=2&a=1&a=0"]
)
def test_the_signature_identifies_the_caller(key: Credentials, service: str, path: str) -> None:
    environ = signed(key, service, f"http://127.0.0.1:4000{path}", b"body")
    assert iam.authenticate(environ, b"body").arn.endswith(":user/me")
    for changed in ({"RAW_URI": "/other"}, {"REQUEST_METHOD": "GET"}, {"HTTP_HOST": "127.0.0.1:4001"}):
        with pytest.raises(iam.AwsError) as raised:
            iam.authenticate(environ | changed, b"body")
        assert raised.value.code == "SignatureDoesNotMatch"
    forged = signed(Credentials(key.access_key, "guessed"), service, f"http://127.0.0.1:4000{path}", b"body")
    with pytest.raises(iam.AwsError, match="does not match"):
        iam.authenticate(forged, b"body")
    stranger = signed(Credentials("AKIANOBODY", "guessed"), service, f"http://127.0.0.1:4000{path}", b"body")
    with pytest.raises(iam.AwsError, match=r"provided access credentials|Access Key Id you provided"):
        iam.authenticate(stranger, b"body")


def test_a_changed_body_is_rejected(key: Credentials) -> None:
    environ = signed(key, "ec2", "http://127.0.0.1:4000/", b"Action=RunInstances")
    with pytest.raises(iam.AwsError, match="does not match"):
        iam.authenticate(environ, b"Action=TerminateInstances")


@pytest.mark.parametrize(
    ("method", "path", "query", "expected"),
    [
        ("GET", "/bucket/a/b", "", ("s3:GetObject", f"{BUCKET}/a/b")),
        ("HEAD", "/bucket/a%20b", "", ("s3:GetObject", f"{BUCKET}/a b")),
        ("PUT", "/bucket/a", "partNumber=1&uploadId=u", ("s3:PutObject", f"{BUCKET}/a")),
        ("POST", "/bucket/a", "uploads=", ("s3:PutObject", f"{BUCKET}/a")),
        ("DELETE", "/bucket/a", "", ("s3:DeleteObject", f"{BUCKET}/a")),
        ("DELETE", "/bucket/a", "uploadId=u", ("s3:AbortMultipartUpload", f"{BUCKET}/a")),
        ("GET", "/bucket", "list-type=2", ("s3:ListBucket", BUCKET)),
        ("PUT", "/bucket", "", ("s3:CreateBucket", BUCKET)),
    ],
)
def test_permissions_of_s3_calls(method: str, path: str, query: str, expected: tuple[str, str]) -> None:
    http: dict[str, Any] = {"method": method, "path": path, "query": query, "body": b""}
    (found,) = permissions.required_by("s3", "", "us-east-1", {}, http)
    assert (found.action, found.resource) == expected


@pytest.mark.parametrize(
    ("method", "actions"),
    [
        ("GET", ["kms:Decrypt"]),
        ("PUT", ["kms:GenerateDataKey"]),
        ("POST", ["kms:Decrypt", "kms:GenerateDataKey"]),
        ("DELETE", []),
    ],
)
def test_objects_of_an_encrypted_bucket_need_its_key(method: str, actions: list[str]) -> None:
    arn = f"arn:aws:kms:us-east-1:{ACCOUNT}:key/mine"
    default = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": arn}}
    with mock_aws():
        s3 = boto3.client("s3", region_name="us-east-1")
        s3.create_bucket(Bucket="bucket")
        s3.put_bucket_encryption(Bucket="bucket", ServerSideEncryptionConfiguration={"Rules": [default]})
        http: dict[str, Any] = {"method": method, "path": "/bucket/a", "query": "", "body": b""}
        found = permissions.required_by("s3", "", "us-east-1", {}, http)[1:]
    via_s3 = {"kms:ViaService": "s3.us-east-1.amazonaws.com"}
    assert found == [permission(action, arn, **via_s3) for action in actions]


def test_a_launch_needs_permissions_for_tags_role_and_image() -> None:
    launch = {
        "ImageId": "resolve:ssm:/aws/service/image",
        "KeyName": "mine",
        "IamInstanceProfile.Name": "mine-worker",
        "NetworkInterface.1.SubnetId": "subnet-1",
        "NetworkInterface.1.SecurityGroupId.1": "sg-1",
        "InstanceMarketOptions.MarketType": "spot",
        "TagSpecification.1.ResourceType": "instance",
        "TagSpecification.1.Tag.1.Key": "ray-project",
        "TagSpecification.1.Tag.1.Value": "mine",
    }
    found = permissions.required_by("ec2", "RunInstances", "us-east-1", launch, {})
    by_kind = {(one.action, one.resource.rpartition(":")[2].partition("/")[0]): one for one in found}
    assert by_kind["ec2:RunInstances", "instance"].context == {"aws:RequestTag/ray-project": "mine"}
    assert by_kind["ec2:RunInstances", "volume"].context == {}
    assert by_kind["ec2:CreateTags", "instance"].context == {"ec2:CreateAction": "RunInstances"}
    assert by_kind["iam:PassRole", "role"].resource.endswith("role/mine-worker")
    assert by_kind["ssm:GetParameters", "parameter"].resource == "arn:aws:ssm:us-east-1::parameter/aws/service/image"
    for kind in ("subnet", "security-group", "key-pair", "spot-instances-request", "image"):
        assert ("ec2:RunInstances", kind) in by_kind
