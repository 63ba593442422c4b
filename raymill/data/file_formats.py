"""Read the rows of files in the formats in which people keep them, each as a stream.

JSONL and parquet files are read in pieces, by several tasks. A file of another format is one piece.
"""

import contextlib
import csv
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from raymill import optional
from raymill.data import files, lance_rows
from raymill.data.examples import decode
from raymill.data.files import InputFile
from raymill.data.table_columns import TableColumns
from raymill.errors import UserError

BATCH_ROWS = 128  # rows decoded at once; few, because rows can be long
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
COMPRESSED_SHARE = 4  # text shrinks about fourfold
MEASURED_FILES, MEASURED_BYTES, MAX_MEASURED_BYTES = 8, 2**23, 2**28  # of text, to see how far it shrinks
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
    deleted: bytes = b""
    """See `files.InputFile`."""
    table: str = "{}"
    """What to know about the table that the file belongs to, as JSON: `tables.TableFacts`."""


class FileFormat(NamedTuple):
    """A format of files with rows."""

    name: str
    read: Callable[[pa.NativeFile, Piece, tuple[str, ...]], Iterator[RawRow]]
    is_split: bool = False
    """Whether several tasks can read one file."""
    is_file: bool = True
    """Whether a piece is part of a file, which `read` gets opened."""
    text_share: float = 1.0
    """About how many bytes of text one byte of a file contains. That of compressed text is measured."""


def format_of(path: str) -> FileFormat:
    """Return the format of a file, by its suffix, which is one of FORMATS."""
    return FORMATS[files.suffix(path)]


def read(filesystem: FileSystem, piece: Piece, columns: tuple[str, ...]) -> Iterator[RawRow]:
    """Yield the rows of one piece. From columnar formats, read only these columns, or all if none of them exists.

    Raises:
        UserError: the file is broken.
    """
    file_format, values = format_of(piece.path), json.loads(piece.values)
    opened = filesystem.open_input_file(piece.path) if file_format.is_file else contextlib.nullcontext()
    with opened as file, _readable_errors(piece.path):
        for row in file_format.read(file, piece, columns):
            yield _with_values(row, values) if values else row


def text_size(filesystem: FileSystem, found: list[InputFile]) -> int:
    """Return about how many bytes of text files contain. Of some compressed files, the beginning is read."""
    compressed = [file for file in found if PurePosixPath(file.path).suffix in COMPRESSIONS]
    sample = compressed[:: max(1, -(-len(compressed) // MEASURED_FILES))]
    measured = np.array([_measured(filesystem, file.path) for file in sample]).reshape(-1, 2).sum(0)
    share = measured[0] / measured[1] if len(sample) else 0.0
    return sum(
        int(file.size * (share if PurePosixPath(file.path).suffix in COMPRESSIONS else format_of(file.path).text_share))
        for file in found
    )


def _measured(filesystem: FileSystem, path: str) -> tuple[int, int]:
    """Return how many bytes of text how many bytes at the beginning of a compressed file stand for."""
    with filesystem.open_input_file(path) as file, contextlib.suppress(_BrokenFile, pa.ArrowInvalid):
        text, length = io.BufferedReader(_Decompressed(file, COMPRESSIONS[PurePosixPath(path).suffix]), BUFFER_BYTES), 0
        # pyarrow reads ahead, so little text that shrinks a lot would count too many bytes of the file
        while length < MEASURED_BYTES or (file.tell() < BUFFER_BYTES and length < MAX_MEASURED_BYTES):
            if not (part := text.read(BUFFER_BYTES)):
                break
            length += len(part)
        return length, max(1, file.tell())
    return COMPRESSED_SHARE, 1


@contextlib.contextmanager
def _readable_errors(path: str) -> Iterator[None]:
    """Raise a UserError if the file is broken."""
    try:
        yield
    except (pa.ArrowInvalid, _BrokenFile) as error:
        raise UserError(f"{path} is not a valid {format_of(path).name} file ({error}). Replace or remove it.") from None


def _with_values(row: RawRow, values: dict[str, str]) -> RawRow:
    """Return a row with more columns. Its own columns take precedence. A row that is not an object stays as it is."""
    if isinstance(row, MalformedRow):
        return row
    try:
        found = decode(row) if isinstance(row, bytes) else row
    except (ValueError, RecursionError):
        return row
    if not isinstance(found, dict):
        return row
    return found | {name: value for name, value in values.items() if found.get(name) is None}


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


def _read_xlsx(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[RawRow]:
    """Yield the rows of a workbook's only sheet with content. The first row names the columns. All numbers are text."""
    optional.check(("openpyxl",), "openpyxl", "Excel files need")
    import openpyxl

    content = io.BytesIO(file.read())  # a sheet is compressed within the file
    try:
        values, formulas = (openpyxl.load_workbook(content, read_only=True, data_only=only) for only in (True, False))
        for sheet in (*values.worksheets, *formulas.worksheets):
            sheet.reset_dimensions()  # some programs write wrong ones
        sheets = [sheet for sheet in values.worksheets if next(sheet.iter_rows(values_only=True), None)]
        if len(sheets) != 1:
            raise _BrokenFile(f"{len(sheets)} sheets have content; save the one with the rows as a file of its own")
        yield from _sheet_rows(sheets[0], formulas[sheets[0].title])
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise _BrokenFile(str(error)) from None


def _sheet_rows(values: Any, formulas: Any) -> Iterator[RawRow]:
    rows, originals = values.iter_rows(values_only=True), formulas.iter_rows(values_only=True)
    header = ["" if name is None else str(name) for name in next(rows)]
    next(originals)
    while header and not header[-1]:
        header.pop()
    if "" in header:
        raise _BrokenFile(f"column {header.index('') + 1} has no name")
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise _BrokenFile(f"two columns have the name {repeated[0]!r}")
    for row, original in zip(rows, originals, strict=True):
        found = [_cell(value) for value in row]
        content = json.dumps(found, ensure_ascii=False, default=str).encode()
        if any(value is None and formula is not None for value, formula in zip(row, original, strict=True)):
            yield MalformedRow(content, "a formula without a stored value")
        elif any(value is not None for value in found[len(header) :]):
            yield MalformedRow(content, "another number of values than the header")
        elif any(value is not None for value in found):
            yield {name: value for name, value in zip(header, found, strict=False) if value is not None}


def _cell(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


# ---------------------------------------------------------------- columns


def _read_row_groups(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    parquet = pq.ParquetFile(file)
    described = [parquet.metadata.row_group(group) for group in range(parquet.num_row_groups)]
    groups = [group for group, found in enumerate(described) if piece.start <= _first_byte(found) < piece.stop]
    table = _table_columns(piece, parquet.schema_arrow)
    present = table.present(columns) if table else _present(parquet.schema_arrow, columns)
    deleted = _deleted_of(piece, sum(found.num_rows for found in described))
    row = sum(found.num_rows for found in described[: groups[0]]) if groups else 0
    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=present):
        if deleted is not None:
            row, kept = row + len(batch), ~deleted[row : row + len(batch)]
            batch = batch.filter(pa.array(kept))
        yield from map(table.rename, to_rows(batch)) if table else to_rows(batch)


def _table_columns(piece: Piece, schema: pa.Schema) -> TableColumns | None:
    """Return the columns of a file of a table, or None for another file.

    Raises:
        _BrokenFile: the file has none of the table's columns.
    """
    if columns := json.loads(piece.table).get("columns"):
        try:
            return TableColumns(columns, schema)
        except ValueError as error:
            raise _BrokenFile(str(error)) from None
    return None


def _deleted(piece: Piece) -> np.ndarray | None:
    """Return whether each row of the file is deleted, or None if no row is. Up to seven values may follow."""
    if not piece.deleted:
        return None
    return np.unpackbits(np.frombuffer(zlib.decompress(piece.deleted), np.uint8)).astype(bool)


def _deleted_of(piece: Piece, rows: int) -> np.ndarray | None:
    """Return whether each of so many rows of a table's file is deleted, or None if no row is.

    Raises:
        _BrokenFile: the file has fewer rows than are deleted.
    """
    bits = _deleted(piece)
    if bits is None:
        return None
    if bits[rows:].any():
        raise _BrokenFile(f"the table has deleted rows after the file's last row, {rows:,}")
    return np.pad(bits[:rows], (0, max(0, rows - len(bits))))


def _first_byte(group: pq.RowGroupMetaData) -> int:
    column = group.column(0)
    return column.dictionary_page_offset or column.data_page_offset


def _read_lance(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Read the rows of a dataset that stand for this share of its bytes, without `file`."""
    dataset = json.loads(piece.table)
    first, stop = (dataset["rows"] * at // dataset["bytes"] for at in (piece.start, piece.stop))
    try:
        for batch in lance_rows.read(dataset["location"], dataset["version"], first, stop, columns):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from to_rows(batch.slice(start, BATCH_ROWS))
    except (RuntimeError, OSError, ValueError) as error:
        raise _BrokenFile(str(error)) from None


def _read_arrow(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    row, deleted = 0, _deleted(piece)
    for batch in _arrow_batches(file):
        present = _present(batch.schema, columns) or batch.schema.names
        if deleted is not None:
            row, kept = row + len(batch), ~deleted[row : row + len(batch)]
            batch = batch.filter(pa.array(kept))
        for first in range(0, batch.num_rows, BATCH_ROWS):
            yield from to_rows(batch.slice(first, BATCH_ROWS).select(present))


def read_arrow(filesystem: FileSystem, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the content of an Arrow file.

    Raises:
        UserError: the file is broken.
    """
    with filesystem.open_input_file(path) as file, _readable_errors(path):
        yield from _arrow_batches(file)


def _arrow_batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Yield the content of Arrow's file format, which is also Feather's, or its stream format, as `datasets` writes."""
    try:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = pa.ipc.open_file(file)
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from pa.ipc.open_stream(file)
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
LANCE = ".lance"
"""The suffix of files in a Lance dataset. One alone holds only some columns of some rows."""
FORMATS = {
    ".parquet": FileFormat("parquet", _read_row_groups, is_split=True, text_share=COMPRESSED_SHARE),
    **TEXT,
    ".jsonl": FileFormat("JSONL", _read_lines, is_split=True),
    ".xlsx": FileFormat("Excel", _read_xlsx, text_share=COMPRESSED_SHARE),
    LANCE: FileFormat("Lance", _read_lance, is_split=True, is_file=False),
    ".arrow": FileFormat("Arrow", _read_arrow),
    ".feather": FileFormat("Feather", _read_arrow),
    **{name + ending: file_format for name, file_format in TEXT.items() for ending in COMPRESSIONS},
}
"""Maps suffixes to formats."""
