"""The `rehearsal` target, which starts the emulated cloud and runs the current verb inside it."""

import sys
from typing import NoReturn

from raymill.common import cluster_file
from raymill.emulator import sandbox
from raymill.target import Target

STARTS_THE_CLOUD = ("doctor", "prepare", "up", "show_capacity", "dollars_per_instance_hour")


class Rehearsal(Target):
    """The target of verbs that you run outside the cloud. Inside the cloud, `targets.get` returns `Aws`."""

    name = "rehearsal"
    profile = "cluster"

    def by_default(self, method: str) -> NoReturn:
        """Run the current verb inside the cloud, and exit."""
        if method in STARTS_THE_CLOUD:
            sandbox.start(cluster_file.load().region)
        sys.exit(sandbox.run(_current_verb()))

    def down(self, owner: str = "", drain_s: int = 0) -> list[str]:
        if not sandbox.is_running():
            print("rehearsal is not up, so there is nothing to stop")
            return sandbox.stop()
        code = sandbox.run(_current_verb())
        if code:
            sys.exit(code)
        left = sandbox.stop()
        if not left:
            print("the emulated AWS is gone, with its network, mounts and hosts")
        return left


def _current_verb() -> list[str]:
    return [sys.executable, "-m", "invoke", *sys.argv[1:]]
