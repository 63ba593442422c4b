"""Decodes the bytes of text files and HTML pages."""

import codecs
import re

# UTF-32 comes before UTF-16, because its mark in little-endian order begins with that of UTF-16
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
DECLARATION = re.compile(rb"""<(?:meta\s[^>]*?charset|\?xml\s[^>]*?encoding)\s*=\s*["']?\s*([\w:.-]+)""", re.IGNORECASE)
DECLARATION_BYTES = 1024  # browsers search for the declaration in the first 1024 bytes
# Browsers read these encodings as supersets of them: https://encoding.spec.whatwg.org/#names-and-labels
SUPERSETS = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "gb2312": "gb18030",
    "gbk": "gb18030",
}
MIN_NULS = 0.2  # share of NUL bytes above which a file without a byte order mark is UTF-16
MAX_UNREADABLE = 0.1  # share of unreadable characters above which a file is not text
UNREADABLE = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
CHECKED = 2**16  # number of bytes or characters at the start of a long file that are checked


class BadDocument(Exception):
    """A document cannot be read. The message says why, in words that follow the document's name."""


def decode(data: bytes, *, is_html: bool = False) -> str:
    """Return the text in `data`.

    The encoding is that of the byte order mark, that which an HTML page declares, UTF-8, UTF-16 or Windows-1252.

    Raises:
        BadDocument: `data` is not text.
    """
    text = _decode(data, _declared(data) if is_html else "")
    head = text[:CHECKED]
    if len(UNREADABLE.findall(head)) > MAX_UNREADABLE * len(head):
        raise BadDocument("is not text. Replace or remove it.")
    return text


def marked_encoding(data: bytes) -> str:
    """Return the encoding that a byte order mark at the start of `data` names, or an empty string."""
    return next((name for mark, name in MARKS.items() if data.startswith(mark)), "")


def valid_unicode(text: str) -> str:
    """Join the halves of surrogate pairs in a text, and replace single halves, which no encoding can express."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _declared(page: bytes) -> str:
    """Return the encoding that a page declares, or an empty string."""
    found = DECLARATION.search(page[:DECLARATION_BYTES])
    try:
        name = codecs.lookup(found[1].decode("ascii", "replace")).name if found else ""
    except LookupError:
        return ""
    # a declaration in ASCII cannot be true if it names an encoding with more bytes for each character
    return "" if name.startswith(("utf-16", "utf-32")) else SUPERSETS.get(name, name)


def _decode(data: bytes, declared: str) -> str:
    if marked := marked_encoding(data):
        return data.decode(marked, "replace").removeprefix("\ufeff")
    head = data[:CHECKED]
    if head.count(0) > MIN_NULS * len(head):
        # the high byte of spaces, line ends and Latin letters is NUL
        return data.decode("utf-16-be" if head[::2].count(0) > head[1::2].count(0) else "utf-16-le", "replace")
    if not (declared and data.isascii()):  # ISO-2022-JP is ASCII
        try:
            return data.decode()  # many pages in UTF-8 declare another encoding
        except UnicodeDecodeError:
            pass
    if declared:
        try:
            return data.decode(declared, "replace")
        except (LookupError, UnicodeError):  # such as "hex" and "idna"
            pass
    text = data.decode(errors="replace")
    replaced = text.count("\ufffd")
    valid = sum(map(len, re.findall(r"[^\x00-\x7f]+", text))) - replaced
    # UTF-8 may have a few broken characters; if most of them are broken, it is another encoding
    return text if valid >= replaced else data.decode("cp1252", "replace")
