"""Instances that stay in the state "shutting-down" before they are terminated, as large ones do for minutes.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html
"""

import threading
from typing import Any

from moto.ec2.models.instances import Instance, InstanceState


class SlowEnds:
    """How long instances take to terminate."""

    def __init__(self) -> None:
        self.seconds = 0.0


def install(slow_ends: SlowEnds) -> None:
    """Change how moto terminates instances in this process."""
    terminate = Instance.terminate

    def begin(self: Any) -> InstanceState:
        if self.state == "shutting-down":
            return InstanceState(self._state.name, self._state.code)
        previous = terminate(self)
        if slow_ends.seconds and previous.name != "terminated":
            _set_state(self, "shutting-down", 32)
            threading.Timer(slow_ends.seconds, _set_state, (self, "terminated", 48)).start()
        return previous

    Instance.terminate = begin


def _set_state(instance: Any, name: str, code: int) -> None:
    instance._state.name, instance._state.code = name, code
