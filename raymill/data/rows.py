"""Read raw rows from parts of parquet and JSONL files."""

import io
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from raymill.data.examples import BadRow, decode, to_json
from raymill.data.row_formats import Format, read_example, without_nulls
from raymill.errors import UserError

PARQUET_ROWS = 128  # rows decoded at once; few, because rows can be long
ARRAY = "a JSON array instead of one object per line; convert it with jq -c '.[]'"
ROWS = pa.schema(
    [
        ("row", pa.large_binary()),  # the example as JSON, or the raw row if there is a problem
        ("problem", pa.string()),
        ("source", pa.int16()),  # number of the input
        ("copy", pa.int16()),  # number of the copy, for inputs with a weight
    ]
)

RawRow = dict[str, Any] | bytes
"""A row as read from a file: a parquet row, or a line of JSONL."""


class Piece(NamedTuple):
    """The lines or row groups that begin in the bytes [start, stop) of a file."""

    path: str
    start: int
    stop: int
    source: int = 0
    """Number of the input."""


def read(filesystem: FileSystem, piece: Piece, columns: tuple[str, ...]) -> Iterator[RawRow]:
    """Yield the rows of one piece. From parquet, read only these columns, or all if none of them exists.

    Raises:
        UserError: a parquet file is broken.
    """
    with filesystem.open_input_file(piece.path) as file:
        if not piece.path.endswith(".parquet"):
            yield from _read_lines(file, piece)
            return
        try:
            yield from _read_row_groups(file, piece, columns)
        except pa.ArrowInvalid as error:
            raise UserError(f"{piece.path} is not a valid parquet file ({error}). Replace or remove it.") from None


def parse(row: RawRow) -> dict[str, Any]:
    """Return the columns of a row, without nulls, which parquet and `datasets.to_json` add for keys that a row lacks.

    Raises:
        BadRow: a line is not a JSON object.
    """
    if isinstance(row, dict):
        return without_nulls(row)
    try:
        columns = decode(row)
        if isinstance(columns, dict):
            return without_nulls(columns) if b"null" in row else columns
    except RecursionError:
        raise BadRow("JSON that is nested too deeply") from None
    except ValueError:
        raise BadRow(ARRAY if row == b"[" else "not valid JSON") from None
    raise BadRow(ARRAY if isinstance(columns, list) else "not a JSON object")


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


def to_bytes(row: RawRow) -> bytes:
    """Return a line of JSONL as it is, or a parquet row as JSON."""
    return row if isinstance(row, bytes) else json.dumps(row, default=str).encode()


def checked(row: RawRow, formats: Iterable[Format]) -> dict[str, Any]:
    """Return the columns `row` and `problem` of ROWS. A conversation gives the same bytes in every file format."""
    try:
        return {"row": to_json(read_example(parse(row), formats)), "problem": None}
    except BadRow as bad:
        return {"row": to_bytes(row), "problem": str(bad)}


def _read_lines(file: pa.NativeFile, piece: Piece) -> Iterator[bytes]:
    lines = io.BufferedReader(file)
    if piece.start:
        lines.seek(piece.start - 1)
        lines.readline()  # skip the rest of a line that began in the previous piece
    while lines.tell() < piece.stop and (line := lines.readline()):
        if line := line.strip():
            yield line


def _read_row_groups(file: pa.NativeFile, piece: Piece, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    parquet = pq.ParquetFile(file)
    groups = [
        group
        for group in range(parquet.num_row_groups)
        if piece.start <= _first_byte(parquet.metadata.row_group(group)) < piece.stop
    ]
    # if no column is known, read all of them, so that rejected rows show their content
    present = [name for name in columns if name in parquet.schema_arrow.names] or None
    for batch in parquet.iter_batches(PARQUET_ROWS, row_groups=groups, columns=present):
        yield from to_rows(batch)


def _first_byte(group: pq.RowGroupMetaData) -> int:
    column = group.column(0)
    return column.dictionary_page_offset or column.data_page_offset
