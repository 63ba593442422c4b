"""Extracts the text of PDF files and HTML pages."""

import io
import logging

from bs4 import BeautifulSoup
from markdownify import MarkdownConverter
from pypdf import PasswordType, PdfReader

from settings import UserError

logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns about every small defect that it repairs

# not part of a page's text: code, and what repeats on each page of a site
DROPPED = "head, script, style, template, noscript, nav, footer, aside, form, iframe, svg, button, [role=navigation]"
CONVERTER = MarkdownConverter(heading_style="atx", strip=["a", "img"], escape_misc=False, escape_underscores=False)


def pdf_pages(data: bytes, path: str) -> list[str]:
    """Return the text of each page.

    Raises:
        UserError: the file is broken, encrypted or without text.
    """
    try:
        reader = PdfReader(io.BytesIO(data))
        # many files have a password for changes only, and can be read with an empty one
        is_locked = reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED
        pages = [] if is_locked else [page.extract_text() for page in reader.pages]
    except Exception as error:  # a malformed file can cause any exception in pypdf
        raise UserError(f"{path} is not a valid PDF file ({error}). Replace or remove it.") from None
    if is_locked:
        raise UserError(f"{path} needs a password. Remove the password, for example with qpdf, or remove the file.")
    if not any(page.strip() for page in pages):
        raise UserError(f"{path} has no text, only images. Add text to it, for example with ocrmypdf, or remove it.")
    return pages


def html_text(data: bytes) -> str:
    """Return the title of a page, and its main content as Markdown, without scripts and navigation."""
    soup = BeautifulSoup(data, "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    for tag in soup.select(DROPPED):
        tag.decompose()
    content = CONVERTER.convert_soup(soup.find("main") or soup.body or soup).strip()
    return content if title in content.partition("\n")[0] else f"{title}\n\n{content}"
