"""The console of all verbs, which shows control characters in foreign text instead of sending them to the terminal."""

from collections.abc import Iterator
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from raymill.printable import printable


class Console(rich.console.Console):
    """A console of Rich. Its own colors and cursor movements are not affected."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text, "\n"), segment.style)


def cell(value: Any) -> str:
    """Return foreign text for one cell of a table, or for one line, without line ends and without Rich's markup."""
    return escape(printable(str(value)))
