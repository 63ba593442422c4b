"""Extracts the text of PDF files and HTML pages."""

import io
import logging
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from pypdf import PasswordType, PdfReader
from selectolax.lexbor import LexborHTMLParser

from raymill.rag import decoding, html_content
from raymill.rag.decoding import BadDocument
from raymill.rag.html_content import Place

logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns about every small defect that it repairs

MIN_SHARE = 0.1  # navigation may be longer than the content, but not ten times; then, perhaps <nav> has no end tag


class Part(NamedTuple):
    """A page of a PDF, or a whole HTML page."""

    text: str
    size: int
    """Approximate number of bytes that it takes in its file."""
    warning: str = ""
    """Which text is lost."""
    problem: str = ""
    """Why there is no text."""


def parts(suffix: str, data: bytes) -> Iterator[Part]:
    """Yield the pages of a PDF file or the only page of an HTML file, which `suffix` distinguishes.

    Raises:
        BadDocument: see `pdf_pages` and `html_page`.
    """
    if suffix == ".pdf":
        yield from pdf_pages(data)
    else:
        yield html_page(data)


def pdf_pages(data: bytes) -> Iterator[Part]:
    """Yield the text of each page.

    Raises:
        BadDocument: the file is broken, encrypted or without text.
    """
    try:
        reader = PdfReader(io.BytesIO(data))
        # many files have a password for changes only, and can be read with an empty one
        is_locked = reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED
        count = 0 if is_locked else len(reader.pages)
    except MemoryError:
        raise
    except Exception as error:  # a malformed file can cause any exception in pypdf
        raise BadDocument(f"is not a valid PDF file ({error}). Replace or remove it.") from None
    if is_locked:
        raise BadDocument("needs a password. Remove the password, for example with qpdf, or remove the file.")
    has_text = False
    for number in range(count):
        part = _pdf_page(reader, number, len(data) // count)
        has_text |= bool(part.text.strip() or part.problem)
        yield part
    if not has_text:
        raise BadDocument("has no text, only images. Add text to it, for example with ocrmypdf, or remove it.")


def html_page(data: bytes) -> Part:
    """Return the title of a page, and its content as Markdown.

    Raises:
        BadDocument: `data` is not text.
    """
    # with `scripting`, a <noscript> in <head> never ends <head>
    page = LexborHTMLParser(decoding.decode(data, is_html=True), scripting=True)
    title = page.head and page.head.css_first("title")
    name = " ".join(title.text().split()) if title else ""
    content = html_content.find(page)
    is_named = name in content.markdown.partition("\n")[0]
    text = content.markdown if is_named else f"{name}\n\n{content.markdown}".strip()
    return Part(text, len(data), _lost_text(content.characters) if data else "")


def _pdf_page(reader: PdfReader, number: int, size: int) -> Part:
    try:
        return Part(reader.pages[number].extract_text(), size)
    except MemoryError:
        raise
    except Exception as error:  # see above
        return Part("", size, problem=f"cannot be read ({error}). Repair the file, for example with qpdf.")


def _lost_text(characters: Counter[Place]) -> str:
    """Return which text is not part of the content if most of it is not, otherwise an empty string."""
    read, hidden = characters[Place.CONTENT], characters[Place.HIDDEN]
    repeated = characters[Place.NAVIGATION] + characters[Place.OUTSIDE]
    if read + hidden + repeated == 0:
        return "has no text. A script may write it: save the page from a browser."
    if read < hidden or read < MIN_SHARE * (hidden + repeated):
        return (
            f"has lost most of its text: {hidden:,} characters are hidden, and {repeated:,} are navigation or outside "
            f"of <main>; {read:,} were read."
        )
    return ""
