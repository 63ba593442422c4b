"""Test that an AWS error becomes one line that says what to do."""

import pytest
from botocore.exceptions import ClientError, NoCredentialsError

from cluster.aws import aws_errors


def answer(code: str, message: str = "", operation: str = "RunInstances") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


def test_a_denied_call_names_the_permission_and_the_resource() -> None:
    words = "User: me is not authorized to perform: iam:PassRole on resource: arn:aws:iam::1:role/x because no policy"
    message = aws_errors.explain(answer("UnauthorizedOperation", words))
    assert message == (
        "you lack the permission iam:PassRole on arn:aws:iam::1:role/x. "
        "Ask the administrator of your AWS account for it"
    )


def test_a_denial_without_words_names_the_call() -> None:
    assert aws_errors.missing_permission(answer("AccessDenied", "", "DescribeStacks")) == "DescribeStacks"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NoCredentialsError(), "aws configure"),
        (answer("ExpiredToken"), "aws sso login"),
        (answer("VpcLimitExceeded", "too many"), "VpcLimitExceeded: too many"),
    ],
)
def test_other_errors_say_what_to_do(error: NoCredentialsError | ClientError, remedy: str) -> None:
    assert remedy in aws_errors.explain(error)
    assert "\n" not in aws_errors.explain(error)
