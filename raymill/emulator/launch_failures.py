"""Instances that EC2 terminates during their launch, although it accepted the launch.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/troubleshooting-launch.html#troubleshooting-launch-internal
https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html
"""

from collections.abc import Iterable

from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason
from moto.kms.models import kms_backends

from raymill.emulator import iam
from raymill.emulator.moto_instances import ACCOUNT, MotoInstance
from raymill.instance_types import INSTANCE_TYPES

KEY_ACTIONS = ("CreateGrant", "Decrypt", "DescribeKey", "GenerateDataKeyWithoutPlaintext", "ReEncryptFrom")
"""What the caller of RunInstances must be allowed to do with the key that encrypts the disks."""
VOLUME_LIMIT = StateReason("Client.VolumeLimitExceeded: Volume limit exceeded", "Client.VolumeLimitExceeded")
KEY_NOT_USABLE = StateReason("Client.InternalError: Client error on launch", "Client.InternalError")
MANAGED_KEY = "alias/aws/ebs"


class LaunchFailures:
    """Which launches fail after EC2 has accepted them."""

    def __init__(self) -> None:
        self.without_volumes = 0
        """How many of the next instances with GPUs are beyond the account's limit of volumes."""
        self._without_key: set[str] = set()

    def note_launch(self, region: str, principal: iam.Principal, instances: Iterable[str]) -> None:
        """Note instances whose launcher may not use the customer's key for their disks."""
        key = disk_key(region, principal.account)
        context = {"kms:ViaService": f"ec2.{region}.amazonaws.com"}
        needed = [iam.Permission(f"kms:{action}", key, context) for action in KEY_ACTIONS if key != MANAGED_KEY]
        if not all(iam.is_allowed(principal.statements, one) for one in needed):
            self._without_key.update(instances)

    def end(self, instance: MotoInstance) -> bool:
        """Terminate a new instance if its launch fails. Return whether it does."""
        is_beyond_limit = bool(self.without_volumes and instance.type in INSTANCE_TYPES)
        self.without_volumes -= is_beyond_limit
        if not is_beyond_limit and instance.id not in self._without_key:
            return False
        instance.moto.terminate()
        instance.moto.state_reason = VOLUME_LIMIT if is_beyond_limit else KEY_NOT_USABLE
        return True


def disk_key(region: str, account: str = ACCOUNT) -> str:
    """Return the ARN of the customer's key that encrypts the account's disks, or MANAGED_KEY."""
    key = ec2_backends[account][region].default_kms_key_id
    kms = kms_backends[account][region]
    managed = kms.describe_key(MANAGED_KEY).arn if kms.alias_exists(MANAGED_KEY) else ""
    return MANAGED_KEY if key in ("", managed) else key
