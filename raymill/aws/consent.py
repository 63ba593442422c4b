"""Ask before anything that costs money, or that may be somebody else's."""

import sys

from raymill.errors import UserError


def ask(question: str, yes: bool, command: str) -> None:
    """Ask the question, unless `yes` is set. `command` is the verb that asks.

    Raises:
        UserError: the user does not agree, or cannot be asked.
    """
    if not yes:
        require(question, f"this costs money and needs your consent. Run: {command} --yes")


def require(question: str, without_terminal: str) -> None:
    """Ask the question.

    Raises:
        UserError: the user does not agree, or cannot be asked. Then the message is `without_terminal`.
    """
    if not sys.stdin.isatty():
        raise UserError(without_terminal)
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:  # Ctrl-D
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("you did not agree, so nothing was done")
