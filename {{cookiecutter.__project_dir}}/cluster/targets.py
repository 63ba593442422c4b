"""The targets by their names."""

from typing import TYPE_CHECKING

import settings

if TYPE_CHECKING:
    from cluster.target import Target

PROFILES = {"local": "local", "rehearsal": "cluster", "aws": "cluster"}
"""Which settings each target takes, known before Ray and boto3 are imported."""


def profile(name: str) -> str:
    """The profile of that target. Raises `settings.Refusal` for an unknown one."""
    if name not in PROFILES:
        raise settings.Refusal(f"target {name!r} is unknown; use: --target {' | '.join(PROFILES)}")
    return PROFILES[name]


def get(name: str) -> "Target":
    """The target of that name, imported now. Raises `settings.Refusal` for an unknown one."""
    profile(name)
    if name == "local":
        from cluster.local import Local

        return Local()
    if name == "rehearsal":
        from cluster.rehearsal import sandbox
        from cluster.rehearsal.target import Rehearsal

        if not sandbox.is_inside():
            return Rehearsal()
    from cluster.aws import Aws

    return Aws()
