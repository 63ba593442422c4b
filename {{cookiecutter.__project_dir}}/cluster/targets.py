"""The targets by their names."""

import settings
from cluster.local import Local
from cluster.target import Target

TARGETS: dict[str, type[Target]] = {"local": Local}


def get(name: str) -> Target:
    """The target of that name. Raises `settings.Refusal` for an unknown one."""
    if name not in TARGETS:
        raise settings.Refusal(f"target {name!r} is unknown; use: --target {' | '.join(TARGETS)}")
    return TARGETS[name]()
