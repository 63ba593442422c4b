"""Explain why AWS rejects credentials: the clock is wrong, the region is not enabled, or they are not valid.

The errors alone do not tell. EC2, for example, answers AuthFailure in all three cases.
https://github.com/aws/aws-sdk-java/issues/519
https://docs.aws.amazon.com/accounts/latest/reference/manage-acct-regions.html
"""

import contextlib
import datetime
import email.utils
import sys

import botocore.session
from botocore.exceptions import BotoCoreError, ClientError

from raymill.common import aws_session

UNKNOWN_KEY = ("AuthFailure", "InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException")
"""AWS's error codes in a region that is not enabled. AuthFailure can also be about the owner of a resource."""
CODES = (
    *("ExpiredToken", "ExpiredTokenException", "SignatureDoesNotMatch", "InvalidSignatureException"),
    *("RequestExpired", "RequestInTheFuture", "RequestTimeTooSkewed"),
    *UNKNOWN_KEY,
)
TOLERATED = datetime.timedelta(minutes=4)
"""A little less than what AWS tolerates: five minutes, and for S3 fifteen."""
ALWAYS_ENABLED = "us-east-1"
SET_CLOCK = {"darwin": "sudo sntp -sS time.apple.com"}
"""Command that sets the clock, if it is another one than on Linux."""


def is_cause(error: ClientError) -> bool:
    """Return whether AWS rejected the credentials."""
    answer = error.response["Error"]
    if answer["Code"] == "AuthFailure":
        return "validate the provided access credentials" in answer.get("Message", "")
    return answer["Code"] in CODES


def explain(error: ClientError, region: str) -> str:
    """Return why AWS rejects the credentials in a region, and what to do. This may call AWS in another region."""
    if ahead := _clock_ahead(error):
        command = SET_CLOCK.get(sys.platform, "sudo timedatectl set-ntp true")
        direction = "ahead of" if ahead > datetime.timedelta() else "behind"
        return f"this machine's clock is {_words(abs(ahead))} {direction} AWS's, which rejects that. Run: {command}"
    answer = error.response["Error"]
    if answer["Code"] in UNKNOWN_KEY and _are_valid_elsewhere(region):
        return (
            f"AWS accepts your credentials in {ALWAYS_ENABLED}, but not in {region}, so {region} is not enabled in "
            f"your account. Set another region in cluster/cluster.yaml, or enable it, which takes minutes to hours: "
            f"aws account enable-region --region-name {region}"
        )
    reason = f"{answer['Code']}: {answer.get('Message', '')}".rstrip(": .")
    return f"AWS rejects your credentials ({reason}). Run: aws configure   or: aws sso login"


def _clock_ahead(error: ClientError) -> datetime.timedelta | None:
    """Return how far this machine's clock is ahead of AWS's, which is in each answer, or None if it is right."""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    with contextlib.suppress(KeyError, ValueError, TypeError):  # no date, or none that is one
        ahead = datetime.datetime.now(datetime.UTC) - email.utils.parsedate_to_datetime(headers["date"])
        return ahead if abs(ahead) > TOLERATED else None
    return None


def _words(time: datetime.timedelta) -> str:
    minutes = time.total_seconds() / 60
    if minutes < 120:
        return f"{minutes:.0f} minutes"
    return f"{minutes / 60:.0f} hours" if minutes < 48 * 60 else f"{time.days} days"


def _are_valid_elsewhere(region: str) -> bool:
    if region == ALWAYS_ENABLED or botocore.session.get_session().get_partition_for_region(region) != "aws":
        return False  # the regions of the other partitions have other credentials, and are always enabled
    try:
        aws_session.start(ALWAYS_ENABLED)  # a role is assumed in the region of the session
        aws_session.client("sts", ALWAYS_ENABLED).get_caller_identity()
    except (BotoCoreError, ClientError):
        return False
    finally:
        aws_session.start(region)
    return True
