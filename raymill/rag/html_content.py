"""Finds the content of an HTML page: what a reader sees, without navigation."""

import re
from collections import Counter
from enum import IntEnum
from typing import NamedTuple

from selectolax.lexbor import LexborHTMLParser

from raymill.rag.markdown import Closer, MarkdownWriter


class Place(IntEnum):
    """Where a text is. An element can move its content to a higher place, but only <main> to a lower one."""

    CONTENT = 0
    OUTSIDE = 1
    """Outside of <main>, on a page that has one."""
    NAVIGATION = 2
    HIDDEN = 3
    CODE = 4


MAIN = "main, [role=main]"
SELECTORS = {
    # repeats on each page of a site
    Place.NAVIGATION: "nav, footer, aside, [role=navigation]",
    # A search in a browser opens "until-found". A button in a heading, as in a list of questions, opens the text below.
    Place.HIDDEN: (
        "[hidden]:not([hidden=until-found i]), dialog:not([open]), button:not(h1 *, h2 *, h3 *, h4 *, h5 *, h6 *)"
    ),
    # also controls, and what a browser shows only if it cannot show something else
    Place.CODE: (
        "head, script, style, template, noscript, svg, iframe, noembed, noframes, audio, video, canvas, select, "
        "datalist, textarea"
    ),
}
CSS_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


class Content(NamedTuple):
    """The content of a page."""

    markdown: str
    characters: Counter[Place]
    """Number of characters in each place, without white space."""


class _Open(NamedTuple):
    """An element whose content is being read."""

    id: int
    outside: Place
    """The place of the element itself."""
    end: Closer | None


def find(page: LexborHTMLParser) -> Content:
    """Return the content of <main>, or that of the whole body if <main> has no text."""
    places = {id_: place for place, selector in SELECTORS.items() for id_ in _ids(page, selector)}
    hidden = [node for node in page.css("[style]") if _is_hidden(node.attributes["style"] or "")]
    places |= dict.fromkeys((node.mem_id for node in hidden), Place.HIDDEN)
    if main := _ids(page, MAIN):
        content = _walk(page, dict.fromkeys(main, Place.CONTENT) | places, Place.OUTSIDE)
        if content.markdown:
            return content
    return _walk(page, places, Place.CONTENT)


def _walk(page: LexborHTMLParser, places: dict[int, Place], place: Place) -> Content:
    """Read the body, which is in `place`. `places` has the elements that move their content, keyed by id.

    There is no recursion, because pages nest as deeply as they like.
    """
    writer = MarkdownWriter()
    characters: Counter[Place] = Counter()
    opened: list[_Open] = []
    root = page.body or page.root
    for node in root.traverse(include_text=True) if root else ():
        parent = node.parent
        while opened and not (parent and parent.mem_id == opened[-1].id):
            _, place, end = opened.pop()
            if end:
                end()
        if text := node.text_content:
            characters[place] += sum(map(len, text.split()))
            if place == Place.CONTENT:
                writer.text(text)
        elif node.is_element_node:
            outside, moved = place, places.get(node.mem_id)
            if moved is not None:
                place = max(place, moved) if moved or place > Place.OUTSIDE else moved
            opened.append(_Open(node.mem_id, outside, writer.start(node) if place == Place.CONTENT else None))
    while opened:
        if end := opened.pop().end:
            end()
    return Content(str(writer), characters)


def _ids(page: LexborHTMLParser, selector: str) -> list[int]:
    return [node.mem_id for node in page.css(selector)]


def _is_hidden(style: str) -> bool:
    declarations = [part.lower().partition(":") for part in CSS_COMMENT.sub("", style).split(";")]
    values = {name.strip(): value.partition("!")[0].strip() for name, _, value in declarations}  # the last one counts
    return values.get("display") == "none" or values.get("visibility") in ("hidden", "collapse")
