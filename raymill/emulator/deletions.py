"""Deletions in the emulated cloud that come too late or too early.

A resource can vanish after a call has listed it: EC2 deletes the volumes of an ended instance itself. Another one is in
use for some more seconds.
https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html
"""

from collections import Counter

from raymill.emulator.iam import AwsError

GONE = {
    "TerminateInstances": "InvalidInstanceID.NotFound",
    "DeleteVolume": "InvalidVolume.NotFound",
    "DeleteNetworkInterface": "InvalidNetworkInterfaceID.NotFound",
    "CancelSpotInstanceRequests": "InvalidSpotInstanceRequestID.NotFound",
    "DeleteKeyPair": "InvalidKeyPair.NotFound",
    "DeleteSchedule": "ResourceNotFound",
    "DeleteSecret": "ResourceNotFound",
}
"""The error of a call that deletes something that does not exist."""
IN_USE = {"DeleteVolume": "VolumeInUse", "DeleteNetworkInterface": "InvalidNetworkInterface.InUse"}
"""The error of a call that deletes something too early."""


class Deletions:
    """Which of the next deletions fail."""

    def __init__(self) -> None:
        self.gone: Counter[str] = Counter()
        """For each action of GONE, how many of the next calls find nothing, because somebody else was faster."""
        self.in_use: Counter[str] = Counter()
        """For each action of IN_USE, how many of the next calls AWS refuses."""

    def check(self, action: str) -> None:
        """Raise `AwsError` if AWS refuses a call."""
        action = _name(action)
        if self.in_use[action]:
            self.in_use[action] -= 1
            raise AwsError(IN_USE[action], "it is in use")

    def late(self, action: str) -> AwsError | None:
        """Return the error of a call after the emulator has done it, if somebody else was faster."""
        action = _name(action)
        if not self.gone[action]:
            return None
        self.gone[action] -= 1
        return AwsError(GONE[action], "it does not exist")


def _name(action: str) -> str:
    return "DeleteSchedule" if action.startswith("DELETE /schedules/") else action
