"""Checks the accelerator that [serve] names. Not in options.py, which is read before Ray is imported."""

from ray.util import accelerators

import settings


def check_accelerator(name: str) -> None:
    """Raise `settings.UserError` if Ray does not know the type of accelerator."""
    known = {value for constant, value in vars(accelerators).items() if constant.isupper()}
    if name != "cpu" and name not in known:
        raise settings.UserError(
            f"Ray does not know the accelerator {name!r}. "
            f"Set accelerator in [serve] to one of: cpu, {', '.join(sorted(known))}."
        )
