"""Libraries that only some inputs need, and that a project does not install unless its owner adds them."""

import importlib
import importlib.util
from typing import Any

from raymill import settings
from raymill.errors import UserError
from raymill.settings import inv


def load(module: str, package: str, what: str) -> Any:
    """Import a module of an optional package, which `what` needs.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec(module):
        return importlib.import_module(module)
    pins = f"requirements/{settings.active_profile()}"
    raise UserError(
        f"{what} need the package {package}, which is not installed. Add {package} to {pins}.in, run the command at "
        f"the top of {pins}.txt, and then: {inv('up')}"
    )
