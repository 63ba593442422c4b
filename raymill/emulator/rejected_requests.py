"""Rejects requests as AWS does if the caller's clock is wrong, or if the account has not enabled the region.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-troubleshooting.html
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

import datetime
from collections.abc import Collection, Mapping
from typing import Any

from raymill.emulator.iam import QUERY_SERVICES, AwsError, unknown_key

TOLERANCE = datetime.timedelta(minutes=5)
FORMAT = "%Y%m%dT%H%M%SZ"


def check_clock(environ: Mapping[str, Any], service: str, ahead_s: float) -> None:
    """Raise `AwsError` if the request's date differs from that of AWS, whose clock is `ahead_s` seconds ahead."""
    if "HTTP_X_AMZ_DATE" not in environ:
        return
    date = environ["HTTP_X_AMZ_DATE"]
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead_s)
    late = now - datetime.datetime.strptime(date, FORMAT).replace(tzinfo=datetime.UTC)
    if abs(late) <= TOLERANCE:
        return
    if service == "ec2":
        raise unknown_key(service)  # it does not tell what is wrong
    if service == "s3":
        message = "The difference between the request time and the current time is too large."
        raise AwsError("RequestTimeTooSkewed", message)
    if late > TOLERANCE:
        message = f"Signature expired: {date} is now earlier than {now - TOLERANCE:{FORMAT}} ({now:{FORMAT}} - 5 min.)"
    else:
        limit = f"{now + TOLERANCE:{FORMAT}}"
        message = f"Signature not yet current: {date} is still later than {limit} ({now:{FORMAT}} + 5 min.)"
    raise AwsError("SignatureDoesNotMatch" if service in QUERY_SERVICES else "InvalidSignature", message)


def check_region(service: str, region: str, disabled: Collection[str]) -> None:
    """Raise `AwsError` if the region is not enabled in the account, and therefore knows none of its credentials."""
    if region in disabled:
        raise unknown_key(service)
