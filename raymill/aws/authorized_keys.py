"""Lets other people connect to the head over ssh, with their own private keys."""

import shlex
from collections.abc import Sequence

from raymill.aws.ssh import SshHead

MARK = "(from settings.toml)"
"""Ends the comment of each key that this module has added."""


def install(head: SshHead, keys: Sequence[str]) -> None:
    """Let the owners of these public keys connect to the head. Remove keys that are no longer in the settings.

    Raises:
        UserError: ssh cannot connect.
    """
    mark, added = shlex.quote(MARK), shlex.quote("".join(f"{key} {MARK}\n" for key in keys))
    head.run(
        f"cd ~/.ssh && umask 077 && {{ grep -vF {mark} authorized_keys; printf %s {added}; }} > authorized_keys.new && "
        "mv authorized_keys.new authorized_keys"
    )
