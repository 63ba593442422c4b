"""Ask before anything that costs money."""

import sys

import settings


def ask(question: str, yes: bool, command: str) -> None:
    """Ask the question, unless `yes` is set. `command` is the verb that asks.

    Raises:
        settings.UserError: the user does not agree, or cannot be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise settings.UserError(f"this costs money and needs your consent. Run: {command} --yes")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise settings.UserError("you did not agree, so nothing was done")
