"""Find a target by its name."""

from typing import TYPE_CHECKING

from raymill.errors import UserError

if TYPE_CHECKING:
    from raymill.target import Target  # imports Ray

PROFILES = {"local": "local", "rehearsal": "cluster", "aws": "cluster"}
"""Settings profile of each target. Verbs can look it up without importing Ray or boto3."""


def profile(name: str) -> str:
    """Return the settings profile of a target. Raises `UserError` for an unknown target."""
    if name not in PROFILES:
        raise UserError(f"unknown target {name!r}. Use: --target {' | '.join(PROFILES)}")
    return PROFILES[name]


def get(name: str) -> "Target":
    """Import and return a target. Raises `UserError` for an unknown name."""
    profile(name)
    if name == "local":
        from raymill.local.target import Local

        return Local()
    if name == "rehearsal":
        from raymill.emulator import sandbox
        from raymill.emulator.target import Rehearsal

        if not sandbox.is_inside():
            return Rehearsal()
    from raymill.aws.target import Aws

    return Aws()
