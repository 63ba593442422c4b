"""Find the current rows of a table of a data lake: the live files of a Delta or Iceberg table, or a Lance dataset.

Only the driver reads a table's log. Each file carries which of its rows are deleted, what its columns are called, and
the values of its partition, so workers need only pyarrow, and lancedb for Lance.
"""

import asyncio
import json
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypedDict
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileSystem

from raymill import optional
from raymill.data import file_formats, files, hub, lance_rows
from raymill.data.files import InputFile, InputFiles
from raymill.data.table_columns import Column
from raymill.errors import UserError

VERSION = "@version="
CATALOG = "iceberg://"
"""Begins the name of a table in a catalog: iceberg://CATALOG/NAMESPACE.TABLE."""
SCHEME = re.compile(r"[a-z0-9]+://|file:(?=/)")
METADATA = ".metadata.json"
PYICEBERG = "pyiceberg[pyarrow]"
DELTA_FEATURES = {"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
"""Features of Delta tables that readers must know, as far as they are known here."""
FIELD_ID = "delta.columnMapping.id"
PHYSICAL_NAME = "delta.columnMapping.physicalName"


class TableFacts(TypedDict, total=False):
    """What readers of a table's files must know."""

    columns: list[Column]
    """Columns of a Delta or Iceberg table."""
    location: str
    """Path or URI of a Lance dataset."""
    version: int
    rows: int
    bytes: int


class TableVersion(NamedTuple):
    """What a version of a table consists of."""

    version: int
    files: list[InputFile]
    facts: TableFacts


def split_version(name: str) -> tuple[str, int | None]:
    """Split PATH@version=N.

    Raises:
        UserError: N is not a whole number.
    """
    path, separator, version = name.rpartition(VERSION)
    if not separator:
        return name, None
    if not re.fullmatch(r"\d+", version):
        raise UserError(f"{name} has no whole number after {VERSION}; write {path}{VERSION}N.")
    return path, int(version)


def find(name: str, section: str) -> InputFiles | None:
    """Return the files with the rows of a table, or None if `name` does not refer to a table.

    Args:
        name: A path or a URI of a table, of an Iceberg table's metadata file, or CATALOG. After it, @version=N may
            follow: a version of a Delta table or Lance dataset, or the id of a snapshot of an Iceberg table.
        section: The section of settings.toml that names the input, for error messages.

    Raises:
        UserError: the library for the format is not installed, or the table or its version cannot be read.
    """
    table, version = split_version(name)
    location = catalog_location(table) if table.startswith(CATALOG) else table
    filesystem, root, kind = _look(location, section)
    if kind not in KINDS:
        if version is not None:
            raise UserError(f"{table} is not a table, so it has no version; pass --input {table}.")
        return None
    current = KINDS[kind](location, filesystem, root, version)
    if not current.files:
        raise UserError(f"{name} has no rows; correct input in [{section}], or pass --input.")
    facts = json.dumps(current.facts, default=str)
    folder = os.path.commonpath([os.path.dirname(file.path) for file in current.files])
    return InputFiles(name, filesystem, folder, current.files, current.version, facts)


def _look(location: str, section: str) -> tuple[FileSystem, str, str | None]:
    """Return a file system, a path on it, and the format of the table there, if there is one."""
    if location.startswith(hub.SCHEME):
        return pa.fs.LocalFileSystem(), location, None
    try:
        filesystem, path = FileSystem.from_uri(location)
        is_metadata = path.endswith(METADATA) and filesystem.get_file_info(path).is_file
        return filesystem, path, "Iceberg" if is_metadata else files.table_at(filesystem, path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{location} cannot be read ({error}); correct input in [{section}], or pass --input."
        ) from None


def _live(
    filesystem: FileSystem, paths: list[str], values: list[dict[str, Any]], deleted: dict[str, np.ndarray], table: str
) -> list[InputFile]:
    """Return the files of a table. `deleted` has a mask for some paths: True for each deleted row.

    Raises:
        UserError: a file is missing, or a mask belongs to none of the files.
    """
    if unmatched := deleted.keys() - set(paths):
        raise UserError(
            f"{table} has deleted rows for {min(unmatched)}, which does not belong to it; write the table's current "
            "rows to parquet files, and pass those as --input."
        )
    found = filesystem.get_file_info(paths)
    if missing := [info.path for info in found if not info.is_file]:
        raise UserError(
            f"{table} is incomplete: {missing[0]} is missing; restore the file, or pass a version whose files exist: "
            f"--input {table}{VERSION}N."
        )
    return sorted(
        InputFile(
            info.path,
            info.size,
            info.mtime_ns or 0,
            json.dumps(of_file, default=str),
            files.deleted_rows(deleted[path]) if path in deleted else b"",
        )
        for info, path, of_file in zip(found, paths, values, strict=True)
    )


def _path(uri: str) -> str:
    """Return a location as a path on a pyarrow file system. A path may contain characters that end one in a URI."""
    return SCHEME.sub("", uri)


# ---------------------------------------------------------------- Delta


def _delta(name: str, filesystem: FileSystem, root: str, version: int | None) -> TableVersion:
    """Read a Delta table's log: which files are live, what is deleted in them, and the values of partitions."""
    optional.check(("deltalake",), "deltalake", "Delta tables need")
    import deltalake

    try:
        table = deltalake.DeltaTable(
            name if "://" in name else root, version=version, storage_options=files.object_store_options()
        )
        if unknown := set(table.protocol().reader_features or ()) - DELTA_FEATURES:
            raise UserError(
                f"{name} uses {', '.join(sorted(unknown))}, which cannot be read here; write the table's current rows "
                "to parquet files, and pass those as --input."
            )
        actions = pa.table(table.get_add_actions()).to_pylist()
        deleted = _delta_deletes(table)
    except (deltalake.exceptions.DeltaError, OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read ({_first_line(error)}); pass another --input.") from None
    ids = table.metadata().configuration.get("delta.columnMapping.mode") == "id"
    columns = [_delta_column(field, ids) for field in json.loads(table.schema().to_json())["fields"]]
    names = {physical: column["name"] for column in columns for physical in column["names"]}
    return TableVersion(
        table.version(),
        _live(
            filesystem,
            [_delta_path(action["path"], root) for action in actions],
            [_named(action.get("partition") or {}, names) for action in actions],
            deleted,
            name,
        ),
        {"columns": columns},
    )


def _delta_deletes(table: Any) -> dict[str, np.ndarray]:
    batches = [pa.record_batch(batch) for batch in table.deletion_vectors()]
    pairs = [pair for one in batches for pair in zip(one["filepath"].to_pylist(), one["selection_vector"], strict=True)]
    return {_path(unquote(uri)): ~kept.values.to_numpy(zero_copy_only=False) for uri, kept in pairs}


def _delta_path(path: str, root: str) -> str:
    """Return a path of the log, which is percent-encoded, and absolute in a clone of another table."""
    return unquote(_path(path)) if SCHEME.match(path) else f"{root}/{unquote(path)}"


def _delta_column(field: dict[str, Any], ids: bool) -> Column:
    metadata, inner = field["metadata"], field["type"]
    while isinstance(inner, dict) and inner["type"] != "struct":
        inner = inner["elementType"] if inner["type"] == "array" else inner["valueType"]
    return Column(
        name=field["name"],
        id=metadata.get(FIELD_ID) if ids else None,
        names=[metadata.get(PHYSICAL_NAME, field["name"])],
        default=None,
        fields=[_delta_column(one, ids) for one in inner["fields"]] if isinstance(inner, dict) else [],
    )


def _named(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(column, column): value for column, value in values.items() if value is not None}


# ---------------------------------------------------------------- Iceberg


def catalog_location(name: str) -> str:
    """Return the URI of the current metadata file of a table in a catalog.

    pyiceberg's own settings describe the catalog: ~/.pyiceberg.yaml, or variables like PYICEBERG_CATALOG__NAME__URI.

    Raises:
        UserError: pyiceberg is not installed, or the catalog or the table cannot be read.
    """
    optional.check(("pyiceberg",), PYICEBERG, "Iceberg tables need")
    from pyiceberg.catalog import load_catalog

    catalog, _, table = name.removeprefix(CATALOG).partition("/")
    try:
        return load_catalog(catalog).load_table(table).metadata_location
    except Exception as error:  # each kind of catalog has its own errors
        raise UserError(
            f"{name} cannot be read ({_first_line(error)}); write {CATALOG}CATALOG/NAMESPACE.TABLE, and describe the "
            "catalog in ~/.pyiceberg.yaml."
        ) from None


def _iceberg(name: str, filesystem: FileSystem, root: str, version: int | None) -> TableVersion:
    """Read an Iceberg table's metadata: which files are live, what is deleted in them, and the numbers of columns."""
    optional.check(("pyiceberg",), PYICEBERG, "Iceberg tables need")
    from pyiceberg.table import StaticTable

    location = files.uri(name, _current_metadata(name, filesystem, root))
    try:
        table = StaticTable.from_metadata(location, _iceberg_storage())
        scan = table.scan(snapshot_id=version)
        snapshot, tasks, schema = scan.snapshot(), list(scan.plan_files()), scan.projection()
        deleted = _iceberg_deletes(tasks, table.io, name)
    except UserError:
        raise
    except Exception as error:  # a damaged file raises errors of many kinds
        raise UserError(f"{name} cannot be read ({_first_line(error)}); pass another --input.") from None
    if other := next((task.file for task in tasks if task.file.file_format.value != "PARQUET"), None):
        raise UserError(
            f"{name} has {other.file_format.value} files, which cannot be read here; write the table's current rows to "
            "parquet files, and pass those as --input."
        )
    specs, mapping = table.metadata.specs(), table.name_mapping()
    names = _names_by_id(mapping) if mapping else {}
    paths = [_path(task.file.file_path) for task in tasks]
    live = _live(
        filesystem,
        paths,
        [_identities(task.file.partition, specs[task.file.spec_id], schema) for task in tasks],
        deleted,
        name,
    )
    return TableVersion(
        snapshot.snapshot_id if snapshot else 0,
        live,
        {"columns": [_iceberg_column(one, names) for one in schema.fields]},
    )


def _iceberg_storage() -> dict[str, str]:
    """Return pyiceberg's settings for an S3 server that is not AWS's. It does not read AWS's own variable."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    return {"s3.endpoint": endpoint, "s3.force-virtual-addressing": "false"} if endpoint else {}


def _current_metadata(name: str, filesystem: FileSystem, root: str) -> str:
    """Return the metadata file of a table's folder, which without a catalog only a hint names.

    Raises:
        UserError: there are several metadata files and no hint.
    """
    if root.endswith(METADATA):
        return root
    folder = f"{root}/metadata"
    if filesystem.get_file_info(f"{folder}/version-hint.text").is_file:
        return root
    found = [info.path for info in filesystem.get_file_info(FileSelector(folder)) if info.path.endswith(METADATA)]
    if len(found) == 1:
        return found[0]
    newest = max(found, key=lambda path: int((re.search(r"\d+", PurePosixPath(path).name) or ["0"])[0]))
    raise UserError(
        f"only the catalog of {name} knows its current version; pass --input {CATALOG}CATALOG/NAMESPACE.TABLE, or the "
        f"metadata file that the catalog names, which is perhaps {files.uri(name, newest)}."
    )


def _iceberg_deletes(tasks: list[Any], io: Any, name: str) -> dict[str, np.ndarray]:
    """Return a mask for each file with deleted rows, from files with positions and from deletion vectors."""
    positions = {one: _deleted_positions(io, one) for task in tasks for one in task.delete_files}
    live = {_path(task.file.file_path) for task in tasks}
    names = {PurePosixPath(path).name: path for path in live}
    for path in {path for found in positions.values() for path in found} - live:
        if other := names.get(PurePosixPath(path).name):
            raise UserError(
                f"{name} has deleted rows for {path}, but its file is {other}: the table was moved; write its current "
                "rows to parquet files where it was, and pass those as --input."
            )
    masks = {}
    for task in tasks:
        path, mask = _path(task.file.file_path), np.zeros(task.file.record_count, bool)
        for one in task.delete_files:
            mask[positions[one].get(path, [])] = True
        if mask.any():
            masks[path] = mask
    return masks


def _deleted_positions(io: Any, file: Any) -> dict[str, np.ndarray]:
    """Return the numbers of the deleted rows of each file that a delete file names."""
    from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    from pyiceberg.table.puffin import PuffinFile

    with io.new_input(file.file_path).open() as stream:
        content = stream.read()
    if file.file_format.value == "PUFFIN":
        puffin = PuffinFile(content)
        for blob in puffin.footer.blobs:
            _check_sum(puffin.get_blob_payload(blob), file.file_path)
        vectors = deletion_vectors_from_puffin_file(puffin)
        return {_path(one.referenced_data_file): one.to_vector().to_numpy() for one in vectors}
    table = pq.read_table(pa.BufferReader(content), columns=["file_path", "pos"])
    paths = table["file_path"].cast(pa.string())
    return {_path(path): table.filter(pc.equal(paths, path))["pos"].to_numpy() for path in pc.unique(paths).to_pylist()}


def _check_sum(vector: bytes, path: str) -> None:
    """Raise ValueError if a deletion vector is damaged, which pyiceberg does not check.

    It consists of a length, a magic number and a bitmap of this length together, and their CRC-32. Length and checksum
    are big-endian (Puffin specification, deletion-vector-v1).
    """
    stop = 4 + int.from_bytes(vector[:4])
    if zlib.crc32(vector[4:stop]) != int.from_bytes(vector[stop : stop + 4]):
        raise ValueError(f"the deletion vector in {path} is damaged")


def _names_by_id(mapping: Iterable[Any]) -> dict[int, list[str]]:
    """Return the names that an Iceberg table gives to the columns of files without numbers."""
    found: dict[int, list[str]] = {}
    for field in mapping:
        if field.field_id is not None:
            found[field.field_id] = list(field.names)
        found |= _names_by_id(field.fields)
    return found


def _iceberg_column(field: Any, names: dict[int, list[str]]) -> Column:
    inner = field.field_type
    while (element := getattr(inner, "element_type", None) or getattr(inner, "value_type", None)) is not None:
        inner = element
    return Column(
        name=field.name,
        id=field.field_id,
        names=names.get(field.field_id, []),
        default=field.initial_default,
        fields=[_iceberg_column(one, names) for one in getattr(inner, "fields", ())],
    )


def _identities(partition: Any, spec: Any, schema: Any) -> dict[str, Any]:
    """Return the columns that a file's partition stands for, because files that Hive wrote do not contain them."""
    from pyiceberg.transforms import IdentityTransform

    found = {}
    for field, value in zip(spec.fields, partition, strict=True):
        name = schema.find_column_name(field.source_id)
        if isinstance(field.transform, IdentityTransform) and name and value is not None:
            kind = schema.find_type(field.source_id)
            plain = isinstance(value, str | bool | float) or str(kind) in ("int", "long")
            found[name] = value if plain else field.transform.to_human_string(kind, value)
    return found


# ---------------------------------------------------------------- Lance


def _lance(name: str, filesystem: FileSystem, root: str, version: int | None) -> TableVersion:
    """Find a version of a Lance dataset. Workers read its rows with lancedb, which leaves out deleted ones."""
    location = files.uri(name, root)
    try:
        found, rows, size = asyncio.run(lance_rows.count(location, version))
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{name} cannot be read ({_first_line(error)}); pass another --input.") from None
    # one name for all rows, because the dataset's files belong to many versions
    listed = [InputFile(f"{root}/rows{file_formats.LANCE}", size, 0)] if rows else []
    return TableVersion(found, listed, {"location": location, "version": found, "rows": rows, "bytes": size})


KINDS = {"Delta": _delta, "Iceberg": _iceberg, "Lance": _lance}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
