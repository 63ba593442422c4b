"""The targets by their names."""

import settings
from cluster.aws import Aws
from cluster.local import Local
from cluster.rehearsal import sandbox
from cluster.rehearsal.target import Rehearsal
from cluster.target import Target

NAMES = ("local", "rehearsal", "aws")


def get(name: str) -> Target:
    """The target of that name. Raises `settings.Refusal` for an unknown one."""
    if name == "local":
        return Local()
    if name == "rehearsal":
        return Aws() if sandbox.is_inside() else Rehearsal()
    if name == "aws":
        return Aws()
    raise settings.Refusal(f"target {name!r} is unknown; use: --target {' | '.join(NAMES)}")
