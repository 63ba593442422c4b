"""Packages that few projects need, so they are installed only if the project's owner adds them."""

import importlib.util
from collections.abc import Iterable

from raymill import settings
from raymill.errors import UserError
from raymill.settings import inv


def check(modules: Iterable[str], package: str, needed_by: str) -> None:
    """Check that the modules of a package can be imported. `needed_by` begins the message, as in "Delta tables need".

    Raises:
        UserError: the package is not installed.
    """
    if not all(map(importlib.util.find_spec, modules)):
        pins = f"requirements/{settings.active_profile()}"
        raise UserError(
            f"{needed_by} the package {package}, which is not installed. Add {package} to {pins}.in, run the command "
            f"at the top of {pins}.txt, and then: {inv('up')}"
        )
