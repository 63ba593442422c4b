"""Test the text that `embed` reads from PDF and HTML files."""

import io
import re
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem
from pypdf import PdfWriter

from pipeline.data.files import InputFile, InputFiles
from pipeline.rag import documents, extraction
from settings import UserError


def pdf(*pages: str) -> bytes:
    """Return a PDF with a line of text on each page. Its format is described in ISO 32000-1, section 7.5."""
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(len(pages)))
    font = "<< /Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>"]
    for number, text in enumerate(pages):
        content = f"BT /F 12 Tf 20 100 Td ({text}) Tj ET" if text else ""
        box = f"/MediaBox [0 0 300 200] /Resources {font} /Contents {4 + 2 * number} 0 R"
        objects += [
            f"<< /Type /Page /Parent 2 0 R {box} >>",
            f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        ]
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    trailer = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n"
    return data + f"{trailer}startxref\n{len(data)}\n%%EOF\n".encode()


def encrypted(user: str, owner: str, algorithm: str) -> bytes:
    writer = PdfWriter(io.BytesIO(pdf("A secret.")))
    writer.encrypt(user, owner, algorithm=algorithm)
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def test_each_page_of_a_pdf_is_a_document(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "manual.pdf"
    file.parent.mkdir()
    file.write_bytes(pdf("Turn it on.", "", "Turn it off."))
    source = InputFiles(str(tmp_path), LocalFileSystem(), str(tmp_path), [InputFile(str(file), 1, 0)])
    found = [(document.id, document.text) for document in documents.read(source, str(file))]
    assert found == [
        ("folder/manual.pdf#page=1", "Turn it on."),
        ("folder/manual.pdf#page=2", ""),
        ("folder/manual.pdf#page=3", "Turn it off."),
    ]
    [batch] = documents.batches(source, [str(file)], {}, lambda text: [text], 10)
    assert batch.seen == ["folder/manual.pdf#page=1", "folder/manual.pdf#page=3"]


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_a_pdf_that_only_needs_a_password_for_changes_is_read(algorithm: str) -> None:
    assert extraction.pdf_pages(encrypted("", "owner", algorithm), "a.pdf") == ["A secret."]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (pdf("", ""), r"has no text, only images\. Add text to it, for example with ocrmypdf, or remove it\."),
        (encrypted("user", "owner", "AES-256"), r"needs a password\. Remove the password, .*, or remove the file\."),
        (b"%PDF-1.4\nnothing", r"is not a valid PDF file \(.*\)\. Replace or remove it\."),
        (b"", r"is not a valid PDF file \(.*\)\. Replace or remove it\."),
        (pdf("text").replace(b"/Kids [3 0 R]", b"/Kids [2 0 R]"), r"is not a valid PDF file \(.*\)\. Replace"),
    ],
)
def test_a_pdf_without_readable_text_is_an_error(data: bytes, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        extraction.pdf_pages(data, "/docs/a.pdf")
    assert re.match(f"/docs/a.pdf {problem}", str(caught.value))
    assert "\n" not in str(caught.value)


def test_html_becomes_its_title_and_content() -> None:
    page = """<!doctype html><html><head><title>Setting  up</title><style>p {}</style></head><body>
    <header><nav><a href="/">Home</a></nav></header><script>track()</script>
    <h2>First</h2><p>Press <b>the</b> big_red <a href="x">button</a> &amp; wait.</p>
    <ul><li>one</li><li>two</li></ul><pre>a = 1</pre><table><tr><th>k</th></tr><tr><td>v</td></tr></table>
    <aside>More articles</aside><div role="navigation">Next</div><footer>Imprint</footer></body></html>"""
    text = extraction.html_text(page.encode())
    assert text.startswith("Setting up\n\n## First\n\nPress **the** big_red button & wait.")
    assert all(part in text for part in ("* one\n* two", "a = 1", "| k |", "| v |"))
    assert not [word for word in ("Home", "track", "p {", "More", "Next", "Imprint", "<") if word in text]
    assert extraction.html_text(b"<title>T</title><body>Menu<main><h1>T</h1>Text</main></body>") == "# T\n\nText"
    assert extraction.html_text('<meta charset="iso-8859-1"><p>Größe'.encode("iso-8859-1")) == "Größe"
    assert extraction.html_text(b"") == ""
