"""Turn the rows of files into checked examples."""

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from raymill.data.examples import BadRow, decode, to_json
from raymill.data.file_formats import NOT_AN_OBJECT, MalformedRow, RawRow
from raymill.data.row_formats import Format, read_example, without_nulls

ARRAY = "a JSON array instead of one object per line; rename the file to .json"
ROWS = pa.schema(
    [
        ("row", pa.large_binary()),  # the example as JSON, or the raw row if there is a problem
        ("problem", pa.string()),
        ("as_read", pa.large_binary()),  # the example before filters changed it, or null if they did not
        ("dropped", pa.string()),  # why filters drop the row, or null
        ("contaminated", pa.bool_()),  # whether the row shares words with an evaluation set; null without filters
        ("source", pa.int16()),  # number of the input
        ("copy", pa.int16()),  # number of the copy, for inputs with a weight
    ]
)


def parse(row: RawRow) -> dict[str, Any]:
    """Return the columns of a row, without nulls, which parquet and `datasets.to_json` add for keys that a row lacks.

    Raises:
        BadRow: a line is not a JSON object.
    """
    if isinstance(row, dict):
        return without_nulls(row)
    if isinstance(row, MalformedRow):
        raise BadRow(row.problem)
    try:
        columns = decode(row)
        if isinstance(columns, dict):
            return without_nulls(columns) if b"null" in row else columns
    except RecursionError:
        raise BadRow("JSON that is nested too deeply") from None
    except ValueError:
        raise BadRow(ARRAY if row == b"[" else "not valid JSON") from None
    raise BadRow(ARRAY if isinstance(columns, list) else NOT_AN_OBJECT)


def to_bytes(row: RawRow) -> bytes:
    """Return a line of JSONL as it is, or a row of another format as JSON."""
    if isinstance(row, MalformedRow):
        return row.content
    return row if isinstance(row, bytes) else json.dumps(row, default=str).encode()


def checked(row: RawRow, formats: Iterable[Format]) -> dict[str, Any]:
    """Return the columns `row` and `problem` of ROWS. A conversation gives the same bytes in every file format."""
    try:
        return {"row": to_json(read_example(parse(row), formats)), "problem": None}
    except BadRow as bad:
        return {"row": to_bytes(row), "problem": str(bad)}
