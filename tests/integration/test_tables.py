"""Test that a table of a data lake gives its current rows, whatever wrote, deleted, renamed or moved them."""

import contextlib
import http.server
import io
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import deltalake
import lancedb
import openpyxl
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pyiceberg.catalog
import pyroaring
import pytest
from pyiceberg import manifest as iceberg_manifest
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import StaticTable
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.typedef import Record
from pyiceberg.utils.config import Config

from raymill import optional, settings
from raymill.data import file_formats, manifest, row_sources
from raymill.errors import UserError

STORAGE = {"allow_http": "true"}
ODD = ["a b", "é%/=+", "x:y#z?", "1 %41"]
"""Values of partitions that paths and URIs write differently."""


@pytest.fixture(params=["local", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/tables-{tmp_path.name}"
    folder = tmp_path / "a é folder"
    folder.mkdir()
    return str(folder)


def table_of(count: int, first: int = 0) -> pa.Table:
    """Return rows with nested columns and odd values of partitions."""
    numbers = range(first, first + count)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "messages": [
                [{"role": "user", "content": f"Question {n}"}, {"role": "assistant", "content": f"Answer {n}"}]
                for n in numbers
            ],
            "part": pa.array([ODD[n % len(ODD)] if n % 7 else None for n in numbers], pa.string()),
            "day": pa.array([n % 3 for n in numbers], pa.date32()),
        }
    )


def read(name: str, columns: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    source = row_sources.find(name)
    found = [row for piece in source.pieces for row in file_formats.read(source.files.filesystem, piece, columns)]
    assert all(isinstance(row, dict) for row in found)
    return sorted(found, key=lambda row: int(row["id"]))  # type: ignore[index, return-value]


def as_text(rows: list[dict[str, Any]]) -> list[str]:
    return [json.dumps(row, default=str, sort_keys=True) for row in rows]


# ---------------------------------------------------------------- Delta


def scanned(name: str, version: int | None = None) -> list[dict[str, Any]]:
    """Return the rows that the library itself reads."""
    table = deltalake.DeltaTable(name, version=version, storage_options=STORAGE)
    return sorted(pa.table(table.scan()).to_pylist(), key=lambda row: row["id"])


def without_nulls(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def test_a_delta_table_gives_its_live_rows(base: str) -> None:
    name = f"{base}/table"
    for first in (0, 30):
        deltalake.write_deltalake(
            name, table_of(30, first), partition_by=["part", "day"], mode="append", storage_options=STORAGE
        )
    table = deltalake.DeltaTable(name, storage_options=STORAGE)
    table.delete("id % 5 = 0")
    table.update(predicate="id = 7", updates={"part": "'moved'"})
    for version in (0, 1, 2, 3, None):
        pinned = name if version is None else f"{name}@version={version}"
        expected = scanned(name, version)
        assert as_text(without_nulls(read(pinned))) == as_text(without_nulls(expected))
        assert row_sources.find(pinned).files.version == (3 if version is None else version)
    assert len(read(name)) == 48
    assert {row["part"] for row in read(name) if row["id"] == 7} == {"moved"}
    assert [row["id"] for row in read(f"{name}@version=0")] == list(range(30))


def roaring_array(rows: list[int]) -> bytes:
    """Return a deletion vector as the Delta protocol stores it: a 64-bit roaring bitmap with a magic number."""
    return struct.pack("<IQI", 1681511377, 1, 0) + pyroaring.BitMap(rows).serialize()


def z85(data: bytes) -> str:
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    data += b"\0" * (-len(data) % 4)
    words = struct.unpack(f">{len(data) // 4}I", data)
    return "".join(alphabet[word // 85**power % 85] for word in words for power in (4, 3, 2, 1, 0))


def delete_by_vector(name: str, deleted: dict[str, dict[str, Any]]) -> None:
    """Append a commit to a local Delta table that gives files, by their paths in the log, deletion vectors."""
    log = Path(name, "_delta_log")
    actions = [json.loads(line) for file in sorted(log.glob("*.json")) for line in file.read_text().splitlines()]
    added = {action["add"]["path"]: action["add"] for action in actions if "add" in action}
    features = {"minReaderVersion": 3, "minWriterVersion": 7}
    commit: list[dict[str, Any]] = [
        {"protocol": features | {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}}
    ]
    for path, vector in deleted.items():
        now = int(time.time() * 1000)
        commit.append({"remove": {"path": path, "deletionTimestamp": now, "dataChange": True}})
        commit.append({"add": added[path] | {"deletionVector": vector, "modificationTime": now}})
    version = len(list(log.glob("*.json")))
    (log / f"{version:020}.json").write_text("".join(json.dumps(action) + "\n" for action in commit))


@pytest.mark.parametrize("kind", ["inline", "file"])
def test_rows_under_a_deletion_vector_are_not_read(kind: str, tmp_path: Path) -> None:
    name = str(tmp_path / "a é table")
    rows = table_of(5000)
    deltalake.write_deltalake(name, rows, partition_by=["part"])
    actions = pa.table(deltalake.DeltaTable(name).get_add_actions()).to_pylist()
    path = next(action["path"] for action in actions if action["partition"]["part"] == ODD[1])
    gone = [0, 1, 127, 128, 129, 500, 1000]
    data = roaring_array(gone)
    if kind == "inline":
        vector = {"storageType": "i", "pathOrInlineDv": z85(data), "sizeInBytes": len(data), "cardinality": len(gone)}
    else:
        file = Path(name, "deletion_vector_61d16c75-6994-46b7-a15b-8b538852e50e.bin")
        file.write_bytes(b"\1" + struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data)))
        vector = {
            "storageType": "p",
            "pathOrInlineDv": file.as_uri(),
            "offset": 1,
            "sizeInBytes": len(data),
            "cardinality": len(gone),
        }
    delete_by_vector(name, {path: vector})
    expected = scanned(name)
    assert len(expected) == rows.num_rows - len(gone)
    assert as_text(without_nulls(read(name))) == as_text(without_nulls(expected))
    assert len(read(f"{name}@version=0")) == rows.num_rows


def test_a_mask_that_belongs_to_no_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = str(tmp_path / "table")
    deltalake.write_deltalake(name, table_of(3))
    mask = pa.record_batch({"filepath": ["file:///elsewhere/x.parquet"], "selection_vector": [[True, False, True]]})
    reader = pa.RecordBatchReader.from_batches(mask.schema, [mask])
    monkeypatch.setattr(deltalake.DeltaTable, "deletion_vectors", lambda table: reader)
    with pytest.raises(UserError, match=r"deleted rows for /elsewhere/x.parquet, which does not belong to it"):
        read(name)


def test_renamed_and_dropped_columns_of_a_delta_table(tmp_path: Path) -> None:
    """The table's log is written by hand, because the library cannot rename columns."""
    physical = pa.struct([("col-r", pa.string()), ("col-c", pa.string()), ("col-gone", pa.string())])
    schema = pa.schema([("col-1", pa.int64()), ("col-2", pa.list_(physical)), ("col-dropped", pa.string())])
    message = {"col-r": "user", "col-c": "hi", "col-gone": "secret"}
    (tmp_path / "p=1").mkdir()
    file = tmp_path / "p=1" / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"col-1": 1, "col-2": [message], "col-dropped": "secret"}], schema), file)
    (tmp_path / "_delta_log").mkdir()

    def field(name: str, own: str, kind: Any, number: int) -> dict[str, Any]:
        metadata = {"delta.columnMapping.physicalName": own, "delta.columnMapping.id": number}
        return {"name": name, "type": kind, "nullable": True, "metadata": metadata}

    fields = [field("role", "col-r", "string", 3), field("content", "col-c", "string", 4)]
    fields.append(field("name", "col-new", "string", 5))
    messages = {"type": "array", "elementType": {"type": "struct", "fields": fields}, "containsNull": True}
    columns = [field("id", "col-1", "long", 1), field("messages", "col-2", messages, 2)]
    columns += [field("added", "col-added", "string", 6), field("day", "col-p", "string", 7)]
    features = ["columnMapping"]
    commit = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": features,
                "writerFeatures": features,
            }
        },
        {
            "metaData": {
                "id": "1",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": columns}),
                "partitionColumns": ["day"],
                "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "7"},
            }
        },
        {
            "add": {
                "path": "p=1/a.parquet",
                "partitionValues": {"col-p": "monday"},
                "size": file.stat().st_size,
                "modificationTime": 0,
                "dataChange": True,
            }
        },
    ]
    log = tmp_path / "_delta_log" / f"{0:020}.json"
    log.write_text("".join(json.dumps(action) + "\n" for action in commit))
    expected = {"id": 1, "messages": [{"role": "user", "content": "hi", "name": None}], "added": None, "day": "monday"}
    assert read(str(tmp_path)) == [expected]
    assert scanned(str(tmp_path)) == [expected]
    assert read(str(tmp_path), ("id", "absent")) == [{"id": 1, "added": None, "day": "monday"}]


def test_unusable_delta_tables_are_one_sentence(tmp_path: Path) -> None:
    name = str(tmp_path / "table")
    deltalake.write_deltalake(name, table_of(30), partition_by=["day"])
    cases: list[tuple[str, str]] = [
        (f"{name}@version=9", "cannot be read .*; pass another --input"),
        (f"{name}@version=x", r"no whole number after @version=; write .*@version=N"),
        (f"{name}/day=1970-01-01", "belongs to the Delta table"),
        (f"{tmp_path}@version=1", "is not a table, so it has no version"),
    ]
    for pinned, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            row_sources.find(pinned)
        assert "\n" not in str(caught.value)
    next(Path(name).rglob("*.parquet")).unlink()
    with pytest.raises(UserError, match=r"is incomplete: .* is missing"):
        row_sources.find(name)


def test_a_version_in_mix_needs_its_weight(tmp_path: Path) -> None:
    name = str(tmp_path / "table")
    deltalake.write_deltalake(name, table_of(30))
    with pytest.raises(UserError, match=r"without a weight after the version; write .*@version=0=WEIGHT"):
        row_sources.find_all(name, (f"{name}@version=0",))
    found = row_sources.find_all(name, (f"{name}@version=0=0.5",))
    assert [source.weight for source in found] == [1, 0.5]


# ---------------------------------------------------------------- Iceberg


@pytest.fixture
def catalog(base: str) -> InMemoryCatalog:
    made = InMemoryCatalog("test", warehouse=base, **STORAGE, **iceberg_storage())
    made.create_namespace("ns")
    return made


def iceberg_storage() -> dict[str, str]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    return {"s3.endpoint": endpoint, "s3.force-virtual-addressing": "false"} if endpoint else {}


def iceberg_rows(table: Any, snapshot: int | None = None) -> list[dict[str, Any]]:
    return sorted(table.scan(snapshot_id=snapshot).to_arrow().to_pylist(), key=lambda row: row["id"])


def iceberg_table(catalog: InMemoryCatalog, identifier: str = "ns.table") -> Any:
    """Return a table with two files, a renamed, an added and a dropped column, and a partition."""
    table = catalog.create_table(identifier, table_of(1).schema, properties={"format-version": "2"})
    with table.update_spec() as update:
        update.add_identity("part")
    table.append(table_of(20))
    with table.update_schema() as update:
        update.rename_column("messages", "chat")
        update.rename_column("messages.element.content", "text")
        update.delete_column("day")
    table.append(table_of(20, 20).select(["id", "part"]).append_column("chat", chat(20, 20)))
    table.delete("id = 3")
    return table


def chat(count: int, first: int) -> pa.Array:
    return pa.array([[{"role": "user", "text": f"New {n}"}] for n in range(first, first + count)])


def test_an_iceberg_table_gives_its_live_rows(catalog: InMemoryCatalog) -> None:
    table = iceberg_table(catalog)
    assert as_text(read(table.metadata_location)) == as_text(iceberg_rows(table))
    assert len(read(table.metadata_location)) == 39
    assert set(read(table.metadata_location)[0]) == {"id", "chat", "part"}
    for snapshot in table.snapshots():
        pinned = f"{table.metadata_location}@version={snapshot.snapshot_id}"
        expected = iceberg_rows(table, snapshot.snapshot_id)
        assert as_text(read(pinned)) == as_text(expected)
        assert row_sources.find(pinned).files.version == snapshot.snapshot_id
    [source] = row_sources.find_all(table.metadata_location, ())
    before = manifest._hash(source.files)
    with table.update_schema() as update:
        update.rename_column("chat", "messages")
    [source] = row_sources.find_all(table.metadata_location, ())
    assert manifest._hash(source.files) != before, "no snapshot says that columns have other names"
    assert set(read(table.metadata_location)[0]) == {"id", "messages", "part"}
    with pytest.raises(UserError, match=r"only the catalog of .* knows .* perhaps .*metadata.json"):
        read(table.location())


@pytest.mark.parametrize("kind", ["sql", "rest"])
def test_a_table_is_found_by_its_name_in_a_catalog(
    kind: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is all that a project has: its catalog says where the current metadata is, after each change."""
    properties = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": base} | STORAGE | iceberg_storage()
    table = iceberg_table(_with_namespace(SqlCatalog("shop", **properties)))
    with contextlib.ExitStack() as stack:
        if kind == "rest":
            properties = {"uri": stack.enter_context(rest_catalog(table))}
        for name, value in {**properties, "type": kind}.items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__SHOP__{name.upper().replace('-', '_').replace('.', '__')}", value)
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # read at the import
        assert as_text(read("iceberg://shop/ns.table")) == as_text(iceberg_rows(table))
        table.delete("id = 5")
        assert len(read("iceberg://shop/ns.table")) == 38
        first = table.snapshots()[0].snapshot_id
        assert len(read(f"iceberg://shop/ns.table@version={first}")) == 20
        with pytest.raises(UserError, match=r"iceberg://shop/ns.other cannot be read \(.*describe the catalog in"):
            read("iceberg://shop/ns.other")
    with pytest.raises(UserError, match=r"iceberg://absent/ns.table cannot be read \(.*describe the catalog in"):
        read("iceberg://absent/ns.table")


def _with_namespace(made: Any) -> Any:
    made.create_namespace("ns")
    return made


@contextlib.contextmanager
def rest_catalog(table: Any) -> Iterator[str]:
    """Yield the URL of a catalog that answers as the REST specification says, and knows this table as ns.table."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.split("?")[0]
            if found == "/v1/config":
                self._answer(200, {"defaults": {}, "overrides": {}})
            elif found == "/v1/namespaces/ns/tables/table":
                metadata = json.loads(table.metadata.model_dump_json())
                self._answer(200, {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}})
            else:
                missing = {"message": "Table does not exist", "type": "NoSuchTableException", "code": 404}
                self._answer(404, {"error": missing})

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def delete_by_positions(
    catalog: InMemoryCatalog, table: Any, positions: dict[str, list[int]], kind: str = "PARQUET"
) -> str:
    """Commit a file with positions of deleted rows, as other engines do. Return the new metadata file."""
    io, snapshot_id = table.io, 4711
    location = f"{table.location()}/data/deletes-{len(positions)}.{kind.lower()}"
    deletes = [{"file_path": path, "pos": row} for path, rows in positions.items() for row in rows]
    content = as_puffin(positions) if kind == "PUFFIN" else as_position_deletes(deletes)
    with io.new_output(location).create() as stream:
        stream.write(content)

    class DeleteManifest(iceberg_manifest.ManifestWriterV2):
        def content(self) -> iceberg_manifest.ManifestContent:
            return iceberg_manifest.ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return super()._meta | {"content": "deletes"}

    output = io.new_output(f"{table.location()}/metadata/deletes-m{len(positions)}.avro")
    spec = PartitionSpec(spec_id=0)
    with DeleteManifest(spec, table.schema(), output, snapshot_id, "null") as writer:
        writer.add_entry(
            iceberg_manifest.ManifestEntry.from_args(
                status=iceberg_manifest.ManifestEntryStatus.ADDED,
                snapshot_id=snapshot_id,
                data_file=iceberg_manifest.DataFile.from_args(
                    content=iceberg_manifest.DataFileContent.POSITION_DELETES,
                    file_path=location,
                    file_format=iceberg_manifest.FileFormat[kind],
                    partition=Record(),
                    record_count=len(deletes),
                    file_size_in_bytes=len(content),
                ),
            )
        )
    written = writer.to_manifest_file()
    parent, sequence = table.current_snapshot(), table.metadata.last_sequence_number + 1
    listing = f"{table.location()}/metadata/snap-{len(positions)}.avro"
    with iceberg_manifest.write_manifest_list(
        2, io.new_output(listing), snapshot_id, parent.snapshot_id, sequence, "null"
    ) as manifests:
        manifests.add_manifests([*parent.manifests(io), written])
    snapshot = Snapshot(
        snapshot_id=snapshot_id,
        parent_snapshot_id=parent.snapshot_id,
        sequence_number=sequence,
        timestamp_ms=int(time.time() * 1000),
        manifest_list=listing,
        summary=Summary(Operation.DELETE),
        schema_id=table.schema().schema_id,
    )
    metadata = table.metadata.model_copy(
        update={
            "snapshots": [*table.metadata.snapshots, snapshot],
            "current_snapshot_id": snapshot_id,
            "last_sequence_number": sequence,
        }
    )
    path = f"{table.location()}/metadata/{90 + len(positions)}-x.metadata.json"
    ToOutputFile.table_metadata(metadata, io.new_output(path))
    return path


def test_rows_that_an_iceberg_delete_file_names_are_not_read(catalog: InMemoryCatalog) -> None:
    table = catalog.create_table("ns.plain", table_of(1).schema, properties={"format-version": "2"})
    table.append(table_of(300))
    table.append(table_of(300, 300))
    first, second = (task.file.file_path for task in table.scan().plan_files())
    metadata = delete_by_positions(catalog, table, {first: [0, 1, 299], second: [7], "elsewhere/gone.parquet": [1]})
    found = read(metadata)
    assert len(found) == 596
    assert as_text(found) == as_text(iceberg_rows(StaticTable.from_metadata(metadata, iceberg_storage())))
    assert len(read(f"{metadata}@version={table.snapshots()[-1].snapshot_id}")) == 600
    if "://" not in catalog.properties["warehouse"]:
        (Path(table.location()) / "data" / "deletes-3.parquet").rename(Path(table.location()) / "elsewhere")
        with pytest.raises(UserError, match=r"cannot be read \(.*deletes-3.parquet.*\); pass another --input"):
            read(metadata)
    moved = delete_by_positions(catalog, table, {f"old/{first.rpartition('/')[2]}": [0]})
    with pytest.raises(UserError, match=r"has deleted rows for .*: the table was moved"):
        read(moved)


def as_position_deletes(deletes: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(deletes, pa.schema([("file_path", pa.string()), ("pos", pa.int64())])), sink)
    return sink.getvalue().to_pybytes()


def as_puffin(positions: dict[str, list[int]]) -> bytes:
    """Return a file with a deletion vector for each data file, as the Puffin specification describes it."""
    content, blobs = b"PFA1", []
    for path, rows in positions.items():
        vector = bytes.fromhex("d1d33964") + struct.pack("<QI", 1, 0) + pyroaring.BitMap(rows).serialize()
        blob = struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector))
        blobs.append(
            {
                "type": "deletion-vector-v1",
                "fields": [],
                "snapshot-id": -1,
                "sequence-number": -1,
                "offset": len(content),
                "length": len(blob),
                "properties": {"referenced-data-file": path, "cardinality": str(len(rows))},
            }
        )
        content += blob
    footer = json.dumps({"blobs": blobs}).encode()
    return content + b"PFA1" + footer + struct.pack("<II", len(footer), 0) + b"PFA1"


def test_rows_under_an_iceberg_deletion_vector_are_not_read(tmp_path: Path) -> None:
    made = InMemoryCatalog("test", warehouse=str(tmp_path))
    made.create_namespace("ns")
    table = made.create_table("ns.plain", table_of(1).schema, properties={"format-version": "2"})
    table.append(table_of(300))
    table.append(table_of(300, 300))
    first, second = sorted(task.file.file_path for task in table.scan().plan_files())
    gone = {first: [0, 1, 299], second: list(range(7, 250))}
    metadata = delete_by_positions(made, table, gone, "PUFFIN")
    assert len(read(metadata)) == 600 - 3 - 243
    assert as_text(read(metadata)) == as_text(iceberg_rows(StaticTable.from_metadata(metadata)))
    file = Path(table.location(), "data", "deletes-2.puffin")
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"the deletion vector in .*deletes-2\.puffin is damaged"):
        read(metadata)


# ---------------------------------------------------------------- Lance


def test_a_lance_dataset_gives_its_live_rows(base: str) -> None:
    database = lancedb.connect(base, storage_options=STORAGE)
    table = database.create_table("table", table_of(2000))
    table.add(table_of(1000, 2000))
    table.delete("id % 3 = 0")
    name = f"{base}/table.lance"
    first = row_sources.find(f"{name}@version=1").files
    table.add(table_of(10, 3000))
    table.delete("id >= 3000")
    assert row_sources.find(f"{name}@version=1").files == first
    assert [row["id"] for row in read(name)] == [n for n in range(3000) if n % 3]
    assert [row["id"] for row in read(f"{name}@version=1")] == list(range(2000))
    assert (
        as_text(read(name, ("messages", "id")))[0]
        == as_text([{"id": 1, "messages": table_of(1, 1)["messages"][0].as_py()}])[0]
    )
    with pytest.raises(UserError, match=r"cannot be read .*; pass another --input"):
        row_sources.find(f"{name}@version=9")


def test_pieces_of_a_lance_dataset_share_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = lancedb.connect(tmp_path).create_table("table", table_of(1000))
    table.delete("id % 7 = 0")
    monkeypatch.setattr(row_sources, "PIECE_BYTES", 3001)
    name = str(tmp_path / "table.lance")
    assert len(row_sources.find(name).pieces) > 3
    assert [row["id"] for row in read(name)] == [n for n in range(1000) if n % 7]


# ---------------------------------------------------------------- the table of the documentation


def write_lake(kind: str, base: str) -> tuple[str, str]:
    """Write 30 rows, then 30 more, and delete twelve. Return the table's name, and that of its first version."""
    if kind == "Delta":
        name = f"{base}/delta"
        for first in (0, 30):
            deltalake.write_deltalake(name, table_of(30, first), mode="append", storage_options=STORAGE)
        deltalake.DeltaTable(name, storage_options=STORAGE).delete("id % 5 = 0")
        return name, f"{name}@version=0"
    if kind == "Iceberg":
        made = InMemoryCatalog("test", warehouse=base, **STORAGE, **iceberg_storage())
        made.create_namespace("ns")
        table = made.create_table("ns.table", table_of(1).schema)
        for first in (0, 30):
            table.append(table_of(30, first))
        table.delete(f"id in ({', '.join(map(str, range(0, 60, 5)))})")
        return table.metadata_location, f"{table.metadata_location}@version={table.snapshots()[0].snapshot_id}"
    table = lancedb.connect(base, storage_options=STORAGE).create_table("table", table_of(30))
    table.add(table_of(30, 30))
    table.delete("id % 5 = 0")
    return f"{base}/table.lance", f"{base}/table.lance@version=1"


def rows_of(name: str, expected: list[int]) -> str:
    """Return how many of the expected rows, with these numbers, a table gives."""
    found = read(name)
    numbers = [row["id"] for row in found]
    right = [n for n, row in zip(numbers, found, strict=True) if row["messages"] == MESSAGES[n]]
    return f"{len(set(right) & set(expected))} of {len(expected)}" + (
        "" if len(numbers) == len(expected) else ", others"
    )


MESSAGES = table_of(60)["messages"].to_pylist()
LIVE, FIRST = [n for n in range(60) if n % 5], list(range(30))


def damaged(name: str, folder: Path) -> str:
    """Cut off the end of all data files. Return the error."""
    for file in folder.rglob("*"):
        if file.suffix == ".parquet" or (file.suffix == ".lance" and file.is_file()):
            file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError) as caught:
        read(name)
    sentence = str(caught.value)
    assert "\n" not in sentence
    start = sentence.index(" is not a valid")
    return f"FILE{sentence[start : sentence.index(' (', start)]}"


def test_the_documented_table_of_tables_is_true(tmp_path: Path, s3: str) -> None:
    lines = ["| table | live rows, local | live rows, S3 | first version | a damaged file |", "|---|---|---|---|---|"]
    for kind in ("Delta", "Iceberg", "Lance"):
        folder = tmp_path / kind
        folder.mkdir()
        name, first = write_lake(kind, str(folder))
        remote, remote_first = write_lake(kind, f"{s3}/lake-{tmp_path.name}-{kind}")
        assert rows_of(remote_first, FIRST) == rows_of(first, FIRST)
        counts = rows_of(name, LIVE), rows_of(remote, LIVE), rows_of(first, FIRST), damaged(name, folder)
        lines.append(f"| {kind} | {' | '.join(counts)} |")
    page = (settings.PROJECT / "docs" / "data.md").read_text(encoding="utf-8")
    made = "\n".join(lines)
    assert made in page, f"put this table into docs/data.md:\n{made}"


# ---------------------------------------------------------------- Excel


def workbook(path: str | IO[bytes], sheets: dict[str, list[list[Any]]]) -> None:
    book = openpyxl.Workbook()
    book.remove(book.worksheets[0])
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(path)


def test_the_rows_of_a_workbook(base: str) -> None:
    name = f"{base}/rows.xlsx"
    rows = [["id", "prompt", "completion", None], [1, "a\nb", 2.5], [None, None], ["2", "é", True], [3, "x", "=1+1"]]
    content = io.BytesIO()
    workbook(content, {"rows": [*rows, [4, "x", "y", "more"]], "empty": []})
    filesystem, path = pa.fs.FileSystem.from_uri(name)
    with filesystem.open_output_stream(path) as file:
        file.write(content.getvalue())
    source = row_sources.find(name)
    [piece] = source.pieces
    found = list(file_formats.read(source.files.filesystem, piece, ()))
    assert found[:2] == [
        {"id": "1", "prompt": "a\nb", "completion": "2.5"},
        {"id": "2", "prompt": "é", "completion": True},
    ]
    assert [row.problem for row in found[2:]] == [  # type: ignore[union-attr]
        "a formula without a stored value",
        "another number of values than the header",
    ]


@pytest.mark.parametrize(
    ("sheets", "message"),
    [
        ({"a": [["x"], ["1"]], "b": [["x"], ["2"]]}, "2 sheets have content"),
        ({"a": [["x", "x"], ["1"]]}, "two columns have the name 'x'"),
        ({"a": [["x", None, "y"], ["1"]]}, "column 2 has no name"),
    ],
)
def test_a_workbook_that_is_not_a_table_is_one_sentence(
    sheets: dict[str, list[list[Any]]], message: str, tmp_path: Path
) -> None:
    workbook(str(tmp_path / "rows.xlsx"), sheets)
    with pytest.raises(UserError, match=rf"rows.xlsx is not a valid Excel file .*{message}.* Replace or remove it"):
        read(str(tmp_path / "rows.xlsx"))


@pytest.mark.parametrize(("module", "what"), [("deltalake", "Delta tables"), ("pyiceberg", "Iceberg tables")])
def test_a_missing_library_is_named(module: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / ("_delta_log/0.json" if module == "deltalake" else "metadata/v1.metadata.json")
    marker.parent.mkdir()
    marker.write_text("{}")
    monkeypatch.setattr(optional.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"{what} need the package {module}.*Add {module}.* to requirements/local.in"):
        row_sources.find(str(tmp_path))
