"""Reads documents from parquet, JSONL, Markdown, text, PDF and HTML files, and splits them into chunks."""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from pipeline.data import files
from pipeline.data.files import InputFiles
from pipeline.rag import extraction
from settings import UserError

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


def read(source: InputFiles, path: str) -> Iterator[Document]:
    """Yield the documents of a file.

    Raises:
        UserError: the file is broken, or a row has no text.
    """
    name = str(PurePosixPath(path).relative_to(source.root))
    with source.filesystem.open_input_file(path) as file:
        size = file.size()
        if path.endswith(".parquet"):
            rows = _parquet_rows(file, path, size)
        elif path.endswith(".jsonl"):
            rows = _json_rows(file, path)
        else:
            yield from _whole_file(file.read(), name, path)
            return
        for number, (row, row_size) in enumerate(rows, 1):
            if not isinstance(row.get("text"), str):
                raise UserError(f"row {number} of {path} has no `text`. Each row needs a `text`; an `id` is optional.")
            yield Document(str(row.get("id") or f"{name}#{number}"), row["text"], row_size)


def _whole_file(data: bytes, name: str, path: str) -> Iterator[Document]:
    if path.endswith(".pdf"):
        pages = extraction.pdf_pages(data, path)
        for number, text in enumerate(pages, 1):
            yield Document(f"{name}#page={number}", text, len(data) // len(pages))
    elif path.endswith((".html", ".htm")):
        yield Document(name, extraction.html_text(data), len(data))
    else:
        yield Document(name, data.decode(errors="replace"), len(data))


def _parquet_rows(file: pa.NativeFile, path: str, size: int) -> Iterator[tuple[dict[str, Any], int]]:
    try:
        parquet = pq.ParquetFile(file)
        columns = [name for name in ("id", "text") if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(PARQUET_ROWS, columns=columns):
            for row in batch.to_pylist():
                yield row, size // parquet.metadata.num_rows
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a valid parquet file ({error}). Replace or remove it.") from None


def _json_rows(file: pa.NativeFile, path: str) -> Iterator[tuple[dict[str, Any], int]]:
    for number, line in enumerate(io.BufferedReader(file), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} is not a JSON object. Fix or remove it.")
        yield row, len(line)


class Chunker:
    """Splits a text into chunks of at most `tokens` tokens, which overlap by about `overlap` tokens."""

    def __init__(self, tokenizer: Tokenizer, tokens: int, overlap: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._overlap = overlap

    def __call__(self, text: str) -> list[str]:
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        chunks, start = [], 0
        while len(offsets) - start > self._tokens:
            stop = _word_start(text, offsets, start, start + self._tokens)
            chunks.append(text[offsets[start][0] : offsets[stop][0]].strip())
            next_start = stop - self._overlap
            start = _word_start(text, offsets, start, next_start) if next_start > start else stop
        return [*chunks, text[offsets[start][0] if start else 0 :].strip()]


def _word_start(text: str, offsets: list[tuple[int, int]], after: int, token: int) -> int:
    """Return the last token in (after, token] that starts a word, or `token` if there is none."""
    for number in range(token, after, -1):
        first = offsets[number][0]
        if text[first].isspace() or text[first - 1].isspace():
            return number
    return token


def batches(
    source: InputFiles, paths: list[str], known: Mapping[str, str], cut: Callable[[str], list[str]], size: int
) -> Iterator[Batch]:
    """Yield the documents of these files in batches of about `size` chunks. A batch contains complete documents.

    `known` maps the ids of the documents in the index to their hashes. Unchanged documents get no chunks.
    """
    seen: list[str] = []
    changed: list[str] = []
    chunks: list[dict[str, Any]] = []
    read_bytes = 0
    for path in paths:
        for document in read(source, path):
            read_bytes += document.size
            if not document.text.strip():
                continue  # treat an empty document as absent
            seen.append(document.id)
            if known.get(document.id) != document.hash:
                chunks += _chunks(document, cut)
                if document.id in known:
                    changed.append(document.id)
            if len(chunks) >= size or len(seen) >= 100 * size:
                yield Batch(seen, changed, pa.Table.from_pylist(chunks, CHUNKS), read_bytes)
                seen, changed, chunks, read_bytes = [], [], [], 0
    yield Batch(seen, changed, pa.Table.from_pylist(chunks, CHUNKS), read_bytes)


def _chunks(document: Document, cut: Callable[[str], list[str]]) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(cut(document.text)):
        yield {"document": document.id, "hash": document.hash, "chunk": number, "text": text}
