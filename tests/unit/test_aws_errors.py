"""Test that an AWS error becomes one line that says what to do."""

import pytest
from botocore.exceptions import ClientError, NoCredentialsError

from raymill.aws import aws_errors


def answer(code: str, message: str = "", operation: str = "RunInstances") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


def test_a_denied_call_names_the_permission_and_the_resource() -> None:
    words = "User: me is not authorized to perform: iam:PassRole on resource: arn:aws:iam::1:role/x because no policy"
    message = aws_errors.explain(answer("UnauthorizedOperation", words))
    assert message == (
        "you lack the permission iam:PassRole on arn:aws:iam::1:role/x. "
        "Ask the administrator of your AWS account for it"
    )


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("with an explicit deny in a service control policy", "Only the administrators of your AWS organization"),
        ("because no service control policy allows the ec2:RunInstances action", "Only the administrators"),
        ("with an explicit deny in a resource control policy", "Only the administrators of your AWS organization"),
        ("because no permissions boundary allows the ec2:RunInstances action", "to extend this boundary"),
        ("with an explicit deny in a permissions boundary", "to extend this boundary"),
        ("because no session policy allows the ec2:RunInstances action", "part of your temporary credentials"),
        ("because no VPC endpoint policy allows the ec2:RunInstances action", "or use another network"),
        ("because no resource-based policy allows the ec2:RunInstances action", "Ask the owner of the resource"),
        ("with an explicit deny in an identity-based policy: arn:aws:iam::1:policy/x", "to change this policy"),
    ],
)
def test_a_denial_says_which_policy_denies_and_who_can_change_it(reason: str, remedy: str) -> None:
    user, resource = "arn:aws:iam::1:user/me", "arn:aws:ec2:x"
    words = f"User: {user} is not authorized to perform: ec2:RunInstances on resource: {resource} {reason}"
    sentence = aws_errors.explain(answer("UnauthorizedOperation", f"You are not authorized to do this. {words}"))
    assert sentence.startswith(f"a policy denies you the permission ec2:RunInstances on arn:aws:ec2:x {reason}. ")
    assert remedy in sentence
    decode = ". Encoded authorization failure message: 4GBmW_x-1"
    sentence = aws_errors.explain(answer("UnauthorizedOperation", f"{words}{decode}"))
    assert sentence.endswith(". For details, run: aws sts decode-authorization-message --encoded-message 4GBmW_x-1")


def test_a_denial_that_is_only_encoded_says_how_to_decode_it() -> None:
    words = "You are not authorized to perform this operation. Encoded authorization failure message: 4GBmW_x-1"
    sentence = aws_errors.explain(answer("UnauthorizedOperation", words))
    assert sentence.startswith("you lack the permission RunInstances. ")
    assert sentence.endswith("--encoded-message 4GBmW_x-1")


def test_the_owner_of_a_resource_is_no_question_of_credentials() -> None:
    sentence = aws_errors.explain(answer("AuthFailure", "Not authorized for images: [ami-1]"))
    assert sentence == "AWS rejected RunInstances (AuthFailure: Not authorized for images: [ami-1])"


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
