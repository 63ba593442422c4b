"""The `rehearsal` target: starts the emulated cloud, then runs the same verb inside it, as the `aws` target does."""

import sys
from typing import NoReturn

from cluster.common import cluster_file
from cluster.doctor import Finding
from cluster.emulator import sandbox
from cluster.target import CloudStatus, Connection


class Rehearsal:
    """The target as it is seen from outside the cloud."""

    name = "rehearsal"
    profile = "cluster"

    def doctor(self) -> list[Finding]:
        sandbox.start(cluster_file.load().region)
        _same_verb_inside()

    def prepare(self) -> None:
        sandbox.start(cluster_file.load().region)
        _same_verb_inside()

    def up(self, yes: bool) -> None:
        sandbox.start(cluster_file.load().region)
        _same_verb_inside()

    def connect(self) -> Connection:
        _same_verb_inside()

    def storage_variables(self) -> dict[str, str]:
        _same_verb_inside()

    def shell(self, command: str) -> int:
        _same_verb_inside()

    def dollars_per_instance_hour(self) -> dict[int, float]:
        sandbox.start(cluster_file.load().region)
        _same_verb_inside()

    def cloud_status(self) -> CloudStatus:
        _same_verb_inside()

    def down(self) -> list[str]:
        if not sandbox.is_running():
            print("rehearsal is not up: there is nothing to end")
            return sandbox.end()
        code = sandbox.run(_this_verb())
        if code:
            sys.exit(code)
        left = sandbox.end()
        if not left:
            print("the emulated cloud is gone, with its network, mounts and hosts")
        return left


def _same_verb_inside() -> NoReturn:
    sys.exit(sandbox.run(_this_verb()))


def _this_verb() -> list[str]:
    return [sys.executable, "-m", "invoke", *sys.argv[1:]]
