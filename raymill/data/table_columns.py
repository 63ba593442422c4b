"""Give the columns of a table's files the names that they have in the table."""

from collections.abc import Callable
from typing import Any, TypedDict

import pyarrow as pa

FIELD_ID = b"PARQUET:field_id"

Convert = Callable[[Any], Any]


class Column(TypedDict):
    """A column of a table, or a field of a struct, and how to find it in the table's files."""

    name: str
    id: int | None
    """Its number, in files whose columns are numbered."""
    names: list[str]
    """Its names in other files."""
    default: Any
    """Its value in files without it."""
    fields: "list[Column]"
    """Fields of a struct, also of one in a list or a map."""


class TableColumns:
    """The columns of one file of a table. A renamed or dropped column keeps its old name in old files."""

    def __init__(self, columns: list[Column], schema: pa.Schema) -> None:
        """Find the columns of the table in a file with this schema.

        Raises:
            ValueError: the columns of the file have neither numbers nor known names.
        """
        self._found = _match(columns, list(schema))
        if not self._found:
            raise ValueError(f"none of the table's columns is in the file, which has {', '.join(schema.names)}")
        self._missing = {column["name"]: column["default"] for column in columns if column["name"] not in self._found}

    def present(self, wanted: tuple[str, ...]) -> list[str]:
        """Return the file's names of the wanted columns, or of all columns of the table if it has none of them."""
        names = [name for name in wanted if name in self._found] or list(self._found)
        return [self._found[name][0] for name in names]

    def rename(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row of the file as a row of the table."""
        read = {name: _apply(convert, row[own]) for name, (own, convert) in self._found.items() if own in row}
        return self._missing | read


def _match(columns: list[Column], fields: list[pa.Field]) -> dict[str, tuple[str, Convert | None]]:
    """Return the name in the file, and how to convert the values, for each column that the file has."""
    by_id = {int(field.metadata[FIELD_ID]): field for field in fields if FIELD_ID in (field.metadata or {})}
    by_name = {field.name: field for field in fields}
    found = {}
    for column in columns:
        if by_id and column["id"] is not None:
            field = by_id.get(column["id"])
        else:
            field = next((by_name[name] for name in column["names"] if name in by_name), None)
        if field:
            found[column["name"]] = field.name, _conversion(column["fields"], field.type)
    return found


def _conversion(columns: list[Column], kind: pa.DataType) -> Convert | None:
    """Return how to rename the fields of the structs in a value, or None if they have the names of the table."""
    if not columns:
        return None
    if pa.types.is_map(kind):
        convert = _conversion(columns, kind.item_type)
        return convert and (lambda values: {key: _apply(convert, value) for key, value in values.items()})
    if not pa.types.is_struct(kind):
        convert = _conversion(columns, kind.value_type)
        return convert and (lambda values: [_apply(convert, value) for value in values])
    found = _match(columns, list(kind))
    missing = {column["name"]: column["default"] for column in columns if column["name"] not in found}
    if (
        not missing
        and len(found) == kind.num_fields
        and all(name == own and not convert for name, (own, convert) in found.items())
    ):
        return None
    return lambda value: missing | {name: _apply(convert, value[own]) for name, (own, convert) in found.items()}


def _apply(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None or isinstance(value, Exception) else convert(value)
