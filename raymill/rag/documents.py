"""Reads documents from parquet, JSONL, Markdown, text, PDF and HTML files, and splits them into chunks."""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raymill import state_files
from raymill.data import files, rows
from raymill.data.examples import BadRow
from raymill.data.files import InputFiles
from raymill.rag import decoding, reader
from raymill.rag.decoding import BadDocument

SUFFIXES = (".parquet", ".jsonl", ".md", ".txt", ".pdf", ".html", ".htm")
PARQUET_ROWS = 256  # rows decoded at once; few, because documents can be long
PIECE_BYTES = 8 * 2**20  # one task reads at most this much, unless a single file is larger
CHUNKS = pa.schema(
    [
        ("document", pa.string()),  # id of the document
        ("hash", pa.string()),  # hash of the document's text
        ("chunk", pa.int32()),  # position in the document
        ("text", pa.string()),
    ]
)


class Document(NamedTuple):
    """A document."""

    id: str
    """The row's id, or the file's path below the source's folder.

    Rows without an id get PATH#NUMBER. Each page of a PDF is a document PATH#page=NUMBER, which browsers can open.
    """
    text: str
    size: int
    """Approximate number of bytes that the document takes in its file."""

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Problem(NamedTuple):
    """A document that cannot be read, or that has lost most of its text."""

    document: str
    """Id of the document. A row whose id cannot be read is PATH#NUMBER."""
    message: str
    """A sentence that begins with the document's file."""
    is_read: bool
    """Whether the document, or the rest of it, is in the index."""


class Batch(NamedTuple):
    """A batch of documents."""

    seen: list[str]
    """Ids of all documents in the batch."""
    changed: list[str]
    """Ids of documents that are in the index with a different text."""
    chunks: pa.Table
    """Chunks of new and changed documents, with the schema CHUNKS."""
    size: int
    """Approximate number of bytes that all documents in the batch take in their files."""
    problems: list[Problem]


def find(name: str) -> InputFiles:
    """Return the files with one of SUFFIXES that `name` refers to: a file, a folder's files, or a glob.

    `name` is an absolute path or a URI. A folder includes its subfolders.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    return files.find(name, SUFFIXES, "embed", recursive=True)


def pieces(source: InputFiles) -> list[list[str]]:
    """Return groups of paths, one group for each reading task. A group is one large file, or several small files."""
    groups: list[list[str]] = []
    room = 0
    for file in source.files:
        if file.size > room:
            groups.append([])
            room = PIECE_BYTES
        groups[-1].append(file.path)
        room -= file.size
    return groups


def read(source: InputFiles, path: str) -> Iterator[Document | Problem]:
    """Yield the documents of a file, and their problems.

    Raises:
        UserError: a parquet file is broken, so it is unknown which documents it holds.
    """
    name = str(PurePosixPath(path).relative_to(source.root))
    try:
        with source.filesystem.open_input_file(path) as file:
            if path.endswith((".parquet", ".jsonl")):
                yield from _rows(file, name, path)
            else:
                yield from _whole_file(file.read(), name, path)
    except (FileNotFoundError, PermissionError) as error:
        yield Problem(name, f"{path} cannot be opened ({error}). Correct or remove it.", is_read=False)


def _rows(file: pa.NativeFile, name: str, path: str) -> Iterator[Document | Problem]:
    found = _parquet_rows(file, path) if path.endswith(".parquet") else _json_rows(file)
    for number, (row, size) in enumerate(found, 1):
        place, id_ = f"row {number} of {path}", f"{name}#{number}"
        if isinstance(row, BadRow):
            yield Problem(id_, f"{place} is {row}. Fix or remove it.", is_read=False)
            continue
        if row.get("id") not in (None, ""):
            id_ = decoding.valid_unicode(str(row["id"]))
        if isinstance(row.get("text"), str):
            yield Document(id_, decoding.valid_unicode(row["text"]), size)
        else:
            message = f"{place} has no `text`. Each row needs a `text`; an `id` is optional."
            yield Problem(id_, message, is_read=False)


def _whole_file(data: bytes, name: str, path: str) -> Iterator[Document | Problem]:
    suffix = PurePosixPath(path).suffix
    try:
        if suffix in (".md", ".txt"):
            yield Document(name, decoding.decode(data), len(data))
        elif suffix == ".pdf":
            yield from _pdf_pages(data, name, path)
        else:
            for page in reader.shared().read(suffix, data):
                if page.warning:
                    yield Problem(name, f"{path} {page.warning}", is_read=True)
                yield Document(name, page.text, page.size)
    except BadDocument as problem:
        yield Problem(name, f"{path} {problem}", is_read=False)


def _pdf_pages(data: bytes, name: str, path: str) -> Iterator[Document | Problem]:
    count = with_text = 0
    try:
        for count, page in enumerate(reader.shared().read(".pdf", data), 1):
            id_ = f"{name}#page={count}"
            if page.problem:
                yield Problem(id_, f"page {count} of {path} {page.problem}", is_read=False)
            else:
                with_text += bool(page.text.strip())
                yield Document(id_, decoding.valid_unicode(page.text), page.size)
    except BadDocument as problem:
        if not with_text:
            raise
        message = f"page {count + 1} of {path} {problem} The pages after it are not read either."
        yield Problem(name, message, is_read=False)
    if 2 * with_text < count:
        remedy = "Add text to the others, for example with ocrmypdf."
        yield Problem(name, f"{path} has text on {with_text:,} of its {count:,} pages. {remedy}", is_read=True)


def _parquet_rows(file: pa.NativeFile, path: str) -> Iterator[tuple[dict[str, Any], int]]:
    size = file.size()
    with state_files.reading_parquet(path, "Replace or remove it."):
        parquet = pq.ParquetFile(file)
        columns = [name for name in ("id", "text") if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(PARQUET_ROWS, columns=columns):
            for row in batch.to_pylist():
                yield row, size // parquet.metadata.num_rows


def _json_rows(file: pa.NativeFile) -> Iterator[tuple[dict[str, Any] | BadRow, int]]:
    lines = io.BufferedReader(file)
    if (encoding := decoding.marked_encoding(lines.peek(4))).startswith(("utf-16", "utf-32")):
        lines = (line.encode() for line in io.TextIOWrapper(lines, encoding, errors="replace", newline="\n"))
    for line in lines:
        if line.strip():
            try:
                yield rows.parse(line), len(line)
            except BadRow as problem:
                yield problem, len(line)


def batches(
    source: InputFiles, paths: list[str], known: Mapping[str, str], cut: Callable[[str], Iterable[str]], size: int
) -> Iterator[Batch]:
    """Yield the documents of these files in batches of about `size` chunks. A batch contains complete documents.

    `known` maps the ids of the documents in the index to their hashes. Unchanged documents get no chunks.
    """
    seen: list[str] = []
    changed: list[str] = []
    chunks: list[dict[str, Any]] = []
    problems: list[Problem] = []
    read_bytes = 0
    for path in paths:
        for document in read(source, path):
            if isinstance(document, Problem):
                problems.append(document)
                continue
            read_bytes += document.size
            if not document.text.strip():
                continue  # treat an empty document as absent
            seen.append(document.id)
            document_hash = document.hash
            if known.get(document.id) != document_hash:
                for number, text in enumerate(cut(document.text)):
                    chunks.append({"document": document.id, "hash": document_hash, "chunk": number, "text": text})
                if document.id in known:
                    changed.append(document.id)
            if len(chunks) >= size or max(len(seen), len(problems)) >= 100 * size:
                yield Batch(seen, changed, pa.Table.from_pylist(chunks, CHUNKS), read_bytes, problems)
                seen, changed, chunks, problems, read_bytes = [], [], [], [], 0
    yield Batch(seen, changed, pa.Table.from_pylist(chunks, CHUNKS), read_bytes, problems)
