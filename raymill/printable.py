"""Makes foreign text safe to print: names, documents, errors and logs that clients, models or other programs wrote.

A terminal obeys control characters. They can hide text, overwrite lines, and fake the output of this project.
"""

import re
from typing import Any, TextIO

# C0 and C1 controls, separators of lines, changes of the writing direction, and halves of surrogate pairs, which
# cannot be encoded. Other invisible characters stay, because Persian, Hindi and emoji need some of them.
CONTROLS = "\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
# Colors and weights of text. 8 is missing, because it hides text.
NUMBER = r"[0-4]|7|9|2[2-479]|[349][0-7]|[34]9|10[0-7]|[34]8;5;\d{1,3}|[34]8;2(?:;\d{1,3}){3}"
COLOR = rf"\x1b\[(?:(?:{NUMBER})(?=[;m])|;)*+m"
LOG = "\n\r\t"
"""Characters that lines of a log may contain."""


def printable(text: str, keep: str = "", *, colors: bool = False) -> str:
    r"""Return the text with escapes such as \x1b in place of control characters, except those in `keep`.

    With `colors`, codes that only change colors stay, too.
    """
    unsafe = f"[{CONTROLS}]" if not keep else f"(?![{keep}])[{CONTROLS}]"
    pattern = f"({COLOR})|{unsafe}" if colors else f"(){unsafe}"
    return re.sub(pattern, lambda found: found[1] or found[0].encode("unicode_escape").decode(), text)


class LogStream:
    """A text stream that prints control characters as escapes, except line ends, tabs and colors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Print the text. Return its length."""
        self._stream.write(printable(text, LOG, colors=True))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
