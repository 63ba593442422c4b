"""Read the rows of files in the formats in which people keep them, each as a stream.

JSONL and parquet files are read in pieces, by several tasks. A file of another format is one piece.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from raymill.data import files
from raymill.data.examples import decode
from raymill.errors import UserError

BATCH_ROWS = 128  # rows decoded at once; few, because rows can be long
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
BUFFER_BYTES = 2**20  # of the content of a file
JSON_CHARACTERS = 2**20  # read at once
MAX_JSON_CHARACTERS = 2**28  # in one row; without a limit, a damaged row would read the rest of the file into memory
WHITE_SPACE = re.compile(r"[ \t\r\n]*")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NOT_AN_OBJECT = "not a JSON object"


class MalformedRow(NamedTuple):
    """A row that its format cannot represent as columns."""

    content: bytes
    problem: str


RawRow = dict[str, Any] | bytes | MalformedRow
"""A row as read from a file: its columns, or a line of JSONL."""


class Piece(NamedTuple):
    """The lines or row groups that begin in the bytes [start, stop) of a file, or a whole file."""

    path: str
    start: int
    stop: int
    source: int = 0
    """Number of the input."""
    values: str = "{}"
    """Columns that all rows of the file have, as JSON."""


class FileFormat(NamedTuple):
    """A format of files with rows."""

    name: str
    read: Callable[[pa.NativeFile, Piece, tuple[str, ...]], Iterator[RawRow]]
    is_split: bool = False
    """Whether several tasks can read one file."""
    text_share: float = 1.0
    """About how many bytes of text one byte of a file contains."""


def format_of(path: str) -> FileFormat:
    """Return the format of a file, by its suffix, which is one of FORMATS."""
    return FORMATS[files.suffix(path)]


def read(filesystem: FileSystem, piece: Piece, columns: tuple[str, ...]) -> Iterator[RawRow]:
    """Yield the rows of one piece. From columnar formats, read only these columns, or all if none of them exists.

    Raises:
        UserError: the file is broken.
    """
    file_format, values = format_of(piece.path), json.loads(piece.values)
    with filesystem.open_input_file(piece.path) as file:
        try:
            for row in file_format.read(file, piece, columns):
                yield _with_values(row, values) if values else row
        except (pa.ArrowInvalid, _BrokenFile) as error:
            raise UserError(
                f"{piece.path} is not a valid {file_format.name} file ({error}). Replace or remove it."
            ) from None


def _with_values(row: RawRow, values: dict[str, str]) -> RawRow:
    """Return a row with more columns. Its own columns take precedence. A row that is not an object stays as it is."""
    if isinstance(row, MalformedRow):
        return row
    try:
        found = decode(row) if isinstance(row, bytes) else row
    except (ValueError, RecursionError):
        return row
    return values | found if isinstance(found, dict) else row


# ---------------------------------------------------------------- text


class _BrokenFile(Exception):
    """A file is damaged or incomplete. The message says how."""


class _Decompressed(io.RawIOBase):
    """The content of a compressed file."""

    def __init__(self, file: pa.NativeFile, compression: str) -> None:
        self._stream = pa.CompressedInputStream(file, compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            raise _BrokenFile(str(error)) from None
        buffer[: len(data)] = data
        return len(data)


def _open(file: pa.NativeFile, piece: Piece) -> io.BufferedReader:
    """Return the content of a text file, without its byte order mark."""
    compression = COMPRESSIONS.get(PurePosixPath(piece.path).suffix)
    content = io.BufferedReader(_Decompressed(file, compression) if compression else file, BUFFER_BYTES)
    if content.peek(3)[:3] == BYTE_ORDER_MARK:
        content.read(3)
    return content


def _as_text(file: pa.NativeFile, piece: Piece) -> TextIO:
    """Return the content of a text file. Bytes that are not UTF-8 make only their own row a bad row."""
    return io.TextIOWrapper(_open(file, piece), "utf-8", errors="surrogateescape", newline="")


def _read_lines(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[bytes]:
    lines = io.BufferedReader(file)
    if piece.start:
        lines.seek(piece.start - 1)
        lines.readline()  # skip the rest of a line that began in the previous piece
    while lines.tell() < piece.stop and (line := lines.readline()):
        if line := line.strip():
            yield line


def _read_compressed_lines(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[bytes]:
    yield from filter(None, map(bytes.strip, _open(file, piece)))


def _read_json(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[RawRow]:
    """Yield the items of an array, or all objects of a file with one object after another."""
    for value in _JsonValues(_as_text(file, piece)):
        yield value if isinstance(value, dict) else MalformedRow(json.dumps(value).encode(), NOT_AN_OBJECT)


class _JsonValues:
    """Iterates over the items of a JSON array, or over the values of a text, and holds only a part of the text.

    ijson would be shorter, but its fast backend replaces half of a surrogate pair by a question mark, and refuses NaN.
    """

    def __init__(self, text: TextIO) -> None:
        self._text, self._part, self._at = text, "", 0

    def __iter__(self) -> Iterator[Any]:
        is_array, count = self._next() == "[", 0
        self._at += is_array
        while (found := self._next()) not in ("", "]"):
            if is_array and count:
                if found != ",":
                    raise _BrokenFile(f"no comma after item {count:,}")
                self._at += 1
                self._next()
            count += 1
            yield self._decode(count)
        if is_array != (found == "]"):
            raise _BrokenFile(f"it ends after item {count:,}, within the array" if is_array else "] without [")
        self._at += is_array
        if self._next():
            raise _BrokenFile("text after the end of the array")

    def _decode(self, number: int) -> Any:
        while True:
            try:
                value, self._at = json.JSONDecoder().raw_decode(self._part, self._at)
                return value
            except RecursionError:
                raise _BrokenFile(f"item {number:,} is nested too deeply") from None
            except json.JSONDecodeError as error:  # perhaps because its end is still to be read
                if len(self._part) - self._at > MAX_JSON_CHARACTERS or not self._read():
                    raise _BrokenFile(f"item {number:,}: {error.msg}") from None

    def _next(self) -> str:
        """Skip white space. Return the next character, or an empty string at the end."""
        while True:
            self._at = WHITE_SPACE.match(self._part, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._part) or not self._read():
                return self._part[self._at : self._at + 1]

    def _read(self) -> bool:
        """Read as much again as is left, so that the work for a long row stays linear. Return False at the end."""
        left = self._part[self._at :]
        added = self._text.read(max(JSON_CHARACTERS, len(left)))
        self._part, self._at = left + added, 0
        return bool(added)


def _read_csv(delimiter: str) -> Callable[[pa.NativeFile, Piece, tuple[str, ...]], Iterator[RawRow]]:
    def read(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[RawRow]:
        csv.field_size_limit(2**31 - 1)  # Python's default is 131,072 characters
        rows = csv.reader(_as_text(file, piece), delimiter=delimiter, strict=True)
        try:
            header = next(rows, [])
            if repeated := sorted({name for name in header if header.count(name) > 1}):
                raise _BrokenFile(f"two columns have the name {repeated[0]!r}")
            for values in rows:
                if len(values) == len(header):
                    yield dict(zip(header, values, strict=True))
                elif values:
                    content = json.dumps(values, ensure_ascii=False).encode(errors="surrogateescape")
                    yield MalformedRow(content, "another number of values than the header")
        except csv.Error as error:
            raise _BrokenFile(f"line {rows.line_num:,}: {error}") from None

    return read


# ---------------------------------------------------------------- columns


def _read_row_groups(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    parquet = pq.ParquetFile(file)
    groups = [
        group
        for group in range(parquet.num_row_groups)
        if piece.start <= _first_byte(parquet.metadata.row_group(group)) < piece.stop
    ]
    present = _present(parquet.schema_arrow, columns)
    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=present):
        yield from to_rows(batch)


def _first_byte(group: pq.RowGroupMetaData) -> int:
    column = group.column(0)
    return column.dictionary_page_offset or column.data_page_offset


def _read_arrow(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Read Arrow's file format, which is also Feather's, or its stream format, which `datasets` writes."""
    try:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = pa.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = reader = pa.ipc.open_stream(file)
        present = _present(reader.schema, columns) or reader.schema.names
        for batch in batches:
            for first in range(0, batch.num_rows, BATCH_ROWS):
                yield from to_rows(batch.slice(first, BATCH_ROWS).select(present))
    except OSError as error:  # a file that ends too early
        raise _BrokenFile(str(error)) from None


def _present(schema: pa.Schema, columns: tuple[str, ...]) -> list[str] | None:
    """Return those of the columns that exist. If none does, return None, so that rejected rows show their content."""
    return [name for name in columns if name in schema.names] or None


def to_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch. Values that Python cannot hold, such as a year beyond 9999, become an exception."""
    try:
        return batch.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError):
        columns = [[_to_python(value) for value in column] for column in batch.columns]
        return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _to_python(value: pa.Scalar) -> Any:
    try:
        return value.as_py(maps_as_pydicts="lossy")
    except (ValueError, OverflowError) as error:
        return error


# ---------------------------------------------------------------- the formats

TEXT = {
    ".jsonl": FileFormat("JSONL", _read_compressed_lines),
    ".json": FileFormat("JSON", _read_json),
    ".csv": FileFormat("CSV", _read_csv(",")),
    ".tsv": FileFormat("TSV", _read_csv("\t")),
}
COMPRESSED_SHARE = 4  # text shrinks about fourfold
FORMATS = {
    ".parquet": FileFormat("parquet", _read_row_groups, is_split=True, text_share=COMPRESSED_SHARE),
    **TEXT,
    ".jsonl": FileFormat("JSONL", _read_lines, is_split=True),
    ".arrow": FileFormat("Arrow", _read_arrow),
    ".feather": FileFormat("Feather", _read_arrow),
    **{
        name + ending: file_format._replace(text_share=COMPRESSED_SHARE)
        for name, file_format in TEXT.items()
        for ending in COMPRESSIONS
    },
}
"""Maps suffixes to formats."""
