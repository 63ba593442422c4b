"""Who calls AWS with the credentials on this machine, and how resources name their owner."""

import re
from dataclasses import dataclass

from raymill.common.cluster_file import ClusterFile

OWNER_TAG = "ray-project-owner"
"""Tag of the stack, from which CloudFormation copies it to the resources, and of the key pair."""
NOT_IN_TAGS = re.compile(r"[^\w .:/=+@-]")
"""Characters that IAM does not accept in the value of a tag, such as the comma, which user names may contain.
https://docs.aws.amazon.com/IAM/latest/APIReference/API_Tag.html
"""
MAX_TAG_LENGTH = 256


@dataclass(frozen=True)
class Caller:
    """The account and the user or role of the credentials."""

    account: str
    arn: str
    """With IAM Identity Center, its last part is the person's name. Of a role that a profile assumes, it is the
    `role_session_name` of the profile, and without one a number that changes."""

    @property
    def owner(self) -> str:
        """The value of OWNER_TAG for what this caller makes."""
        return NOT_IN_TAGS.sub("_", self.arn)[:MAX_TAG_LENGTH]


def ask(file: ClusterFile) -> Caller:
    """Return the caller. Every caller may ask this."""
    answer = file.client("sts").get_caller_identity()
    return Caller(answer["Account"], answer["Arn"])
