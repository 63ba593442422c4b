"""Writes text with the structure of HTML elements as Markdown."""

import re
from collections.abc import Callable
from functools import partial

from selectolax.lexbor import LexborNode

PARAGRAPHS = re.compile(
    "address|article|aside|blockquote|body|caption|center|dd|details|dialog|div|dl|dt|fieldset|"
    "figcaption|figure|footer|form|header|hgroup|hr|legend|main|nav|p|search|section|summary"
)
HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
LISTS = frozenset({"ul", "ol", "menu", "dir"})
PRE = frozenset({"pre", "listing", "plaintext", "xmp"})
EMPHASIS = {"b": "**", "strong": "**", "i": "*", "em": "*", "code": "`", "kbd": "`", "samp": "`"}
LEVELS_SHOWN = 8  # deeper lists are not indented further, because the indentation would outgrow the text
MAX_COLUMNS = 100  # that one cell may span

Closer = Callable[[], None]
"""Ends an element."""


class _Table:
    """An open table."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.is_layout = False


class MarkdownWriter:
    """Collects the text of nested elements."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._newlines = 0  # before the next text
        self._space = False  # before the next text
        self._marks: list[str] = []  # before the next text, such as that of a list item
        self._emphasis: set[str] = set()
        self._lists: list[int] = []  # for each open list, the number of its next item, or 0 if it has bullets
        self._in_heading = 0
        self._pre: list[str] = []  # preformatted text
        self._in_pre = 0
        self._tables: list[_Table] = []

    def __str__(self) -> str:
        return "".join(self._parts)

    def text(self, text: str) -> None:
        if self._in_pre:
            self._pre.append(text)
            return
        if words := text.split():
            self._space |= text[0].isspace()
            self._write(" ".join(words))
        self._space |= bool(text) and text[-1].isspace()

    def start(self, element: LexborNode) -> Closer | None:
        """Begin an element. Return a function that ends it, if there is anything to do."""
        tag = element.tag or ""
        if self._in_pre and tag not in PRE:
            return self._start_in_pre(tag)
        if tag in EMPHASIS and EMPHASIS[tag] not in self._emphasis:
            return self._start_emphasis(EMPHASIS[tag])
        if tag == "br":
            self._break(1)
        elif PARAGRAPHS.fullmatch(tag):
            self._break(2)
            return partial(self._break, 2)
        elif tag in HEADINGS:
            return self._start_heading(HEADINGS[tag])
        elif tag in LISTS:
            return self._start_list(int(tag == "ol"))
        elif tag == "li":
            return self._start_item()
        elif tag in PRE:
            self._in_pre += 1
            return self._end_pre
        elif tag == "table":
            if self._tables:
                self._tables[-1].is_layout = True
            self._tables.append(_Table())
            return self._end_table
        elif tag == "tr" and self._tables:
            self._tables[-1].rows.append([])
        elif tag in ("td", "th") and self._tables:
            return self._start_cell(element.attributes.get("colspan") or "")
        return None

    def _write(self, text: str) -> None:
        if self._parts:
            if self._newlines:
                level = len(self._lists) - self._begins_line()  # continue below an item's text, not below its bullet
                self._parts.append("\n" * self._newlines + "  " * min(max(level, 0), LEVELS_SHOWN))
            elif self._space:
                self._parts.append(" ")
        self._parts += [*self._marks, text]
        self._newlines, self._space, self._marks = 0, False, []

    def _break(self, newlines: int) -> None:
        """End the line. The first text of a heading or list item stays on the line of its mark."""
        if self._in_heading:
            self._space = True
        elif not self._begins_line():
            self._newlines = max(self._newlines, newlines)

    def _begins_line(self) -> bool:
        """Return whether a heading or list item has begun and has no text yet. Only their marks end with a space."""
        return any(mark.endswith(" ") for mark in self._marks)

    def _start_marked(self, mark: str) -> Callable[[], bool]:
        """Write a mark before the next text. Return a function that returns whether there was any text."""
        self._marks.append(mark)
        before = len(self._parts)

        def end() -> bool:
            if len(self._parts) > before:
                return True
            self._marks.pop()
            return False

        return end

    def _start_emphasis(self, mark: str) -> Closer:
        self._emphasis.add(mark)
        has_text = self._start_marked(mark)

        def end() -> None:
            self._emphasis.discard(mark)
            if has_text():
                self._parts.append(mark)

        return end

    def _start_heading(self, mark: str) -> Closer:
        self._break(2)
        self._in_heading += 1
        has_text = self._start_marked(mark)

        def end() -> None:
            has_text()
            self._in_heading -= 1
            self._break(2)

        return end

    def _start_list(self, number: int) -> Closer:
        self._break(1 if self._lists else 2)
        self._lists.append(number)

        def end() -> None:
            self._lists.pop()
            self._newlines = 1 if self._lists else 2

        return end

    def _start_item(self) -> Closer:
        number = self._lists[-1] if self._lists else 0
        if number:
            self._lists[-1] += 1
        self._break(1)
        has_text = self._start_marked(f"{number}. " if number else "* ")

        def end() -> None:
            has_text()
            self._newlines = 1  # no empty lines between items that contain paragraphs

        return end

    def _start_in_pre(self, tag: str) -> Closer | None:
        if tag == "br":
            self._pre.append("\n")
        if tag in ("li", "tr") or PARAGRAPHS.fullmatch(tag):
            self._end_line_in_pre()
            return self._end_line_in_pre
        return None

    def _end_line_in_pre(self) -> None:
        if self._pre and not self._pre[-1].endswith("\n"):
            self._pre.append("\n")

    def _end_pre(self) -> None:
        self._in_pre -= 1
        if self._in_pre:
            return
        text = "".join(self._pre).strip("\n").rstrip()
        self._pre = []
        if text:
            self._break(2)
            self._write(f"```\n{text}\n```")
            self._break(2)

    def _start_cell(self, span: str) -> Closer:
        """Collect the text of a cell apart from that of the page."""
        outside = self._parts, self._newlines, self._space, self._marks, self._lists, self._in_heading
        self._parts, self._newlines, self._space, self._marks, self._lists, self._in_heading = [], 0, False, [], [], 0

        def end() -> None:
            table = self._tables[-1]
            text = str(self)
            table.is_layout |= "\n\n" in text
            skipped = min(int(span), MAX_COLUMNS) - 1 if span.isdecimal() and len(span) < 9 else 0
            if not table.rows:
                table.rows.append([])
            table.rows[-1] += [text, *[""] * skipped]
            self._parts, self._newlines, self._space, self._marks, self._lists, self._in_heading = outside

        return end

    def _end_table(self) -> None:
        table = self._tables.pop()
        rows = [row for row in table.rows if any(row)]
        if table.is_layout:
            text = "\n\n".join(cell for row in rows for cell in row if cell)
        else:
            lines = [f"| {' | '.join(' '.join(cell.split()) for cell in row)} |" for row in rows]
            text = "\n".join([*lines[:1], f"|{' --- |' * len(rows[0])}", *lines[1:]]) if rows else ""
        if text:
            self._break(2)
            self._write(text)
            self._break(2)
