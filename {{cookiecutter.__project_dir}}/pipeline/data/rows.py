"""Reads raw rows, parquet or JSONL, as a Ray dataset that streams.

Not `ray.data.read_json`: with it one broken line fails the whole file, rows of unlike shape fail the block, and
one large file is read by one task.
"""

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import ray.data

import settings
from pipeline.data.conversations import to_json
from pipeline.data.row_formats import COLUMNS, NO_FORMAT, WANTED, BadRow, example, format_of, without_nulls
from pipeline.ray_support.private.data import partition
from settings import UserError

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

PIECE_BYTES = 32 * 2**20  # of a file, read by one task
MOST_COPIES = 1000  # of a row
PARQUET_ROWS = 128  # decoded together: rows can be long
BATCH_BYTES = 4 * 2**20  # of rows, handed on together
TEXT_PER_BYTE = {".jsonl": 1, ".parquet": 4}  # text in a byte of a file; conversations compress about fourfold
ROWS = pa.schema(
    [
        ("row", pa.large_binary()),  # the example as canonical JSON, or what was found where there is a problem
        ("problem", pa.string()),
        ("source", pa.int16()),  # number of the input
        ("copy", pa.int16()),  # number of the copy, for inputs with a weight
    ]
)

HUB = "hf://"

Found = dict[str, Any] | bytes
"""A row as it stands in a file: a parquet row, or a line of JSONL."""


class File(NamedTuple):
    """One input file; `changed_ns` is its time of change in ns since 1970."""

    path: str
    size: int
    changed_ns: int

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix


class Piece(NamedTuple):
    """What begins in the bytes [start, stop) of a file: lines, or row groups."""

    path: str
    start: int
    stop: int
    source: int = 0
    """Number of the input."""


class Source(NamedTuple):
    """The files that an input names."""

    name: str
    filesystem: pyarrow.fs.FileSystem
    files: list[File]
    weight: float = 1.0
    """How many times each row is used, on average."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def text_size(self) -> int:
        """About how many bytes of text the files hold."""
        return sum(file.size * TEXT_PER_BYTE[file.suffix] for file in self.files)

    @property
    def pieces(self) -> list[Piece]:
        return [
            Piece(file.path, start, min(start + PIECE_BYTES, file.size))
            for file in self.files
            for start in range(0, file.size, PIECE_BYTES)
        ]


def find_all(name: str, mix: Iterable[str]) -> list[Source]:
    """Return the source `name`, and those of `mix`, each INPUT=WEIGHT.

    Raises:
        UserError: as `find`, or a weight is not a positive number.
    """
    sources = [find(settings.resolve(name))]
    for part in mix:
        other, _, weight = part.rpartition("=")
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if not other or not 0 < value < MOST_COPIES:
            raise UserError(f"mix has {part!r}; write INPUT=WEIGHT, with a weight above 0 and below {MOST_COPIES}.")
        sources.append(find(settings.resolve(other))._replace(weight=value))
    return sources


def names(sources: list[Source]) -> list[tuple[str, str]]:
    """Return for each source the setting that names it, and its name."""
    return [("mix" if number else "input", source.name) for number, source in enumerate(sources)]


def find(name: str, section: str = "preprocess") -> Source:
    """The .parquet and .jsonl files that an absolute path or URI names: a file, a folder's own, or a glob's.

    `section` of the settings is who names it.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    try:
        filesystem, path = _on_the_hub(name) if name.startswith(HUB) else pyarrow.fs.FileSystem.from_uri(name)
        found = list_files(filesystem, path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{name} cannot be read ({error}); correct input in [{section}], or pass --input.") from None
    files = sorted(
        File(info.path, info.size, info.mtime_ns or 0)
        for info in found
        if info.is_file and PurePosixPath(info.path).suffix in TEXT_PER_BYTE
    )
    if not files:
        raise UserError(f"no .parquet or .jsonl file is at {name}; correct input in [{section}], or pass --input.")
    return Source(name, filesystem, files)


def _on_the_hub(uri: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the hub as a file system, and a path in it. For a whole data set: its train split, as parquet."""
    from huggingface_hub import HfFileSystem

    hub, path = HfFileSystem(), uri.removeprefix(HUB)
    if re.fullmatch(r"datasets/[^/@]+/[^/@]+", path):
        path = _only(hub, _only(hub, f"{path}@~parquet", "default"), "train")
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(hub)), path


def _only(hub: "HfFileSystem", folder: str, preferred: str) -> str:
    """Return the subfolder `preferred`, or the only one.

    Raises:
        UserError: there are several others, or none.
    """
    entries = cast("list[dict[str, Any]]", hub.ls(folder, detail=True))
    found = [entry["name"] for entry in entries if entry["type"] == "directory"]
    chosen = [path for path in found if path.endswith(f"/{preferred}")] or found
    if len(chosen) == 1:
        return chosen[0]
    if not found:
        raise UserError(
            f"{HUB}{folder} is empty: the hub has not converted this data set; name its files with --input."
        )
    names = ", ".join(path.rpartition("/")[2] for path in found)
    raise UserError(f"{HUB}{folder} has {names}; name one: --input {HUB}{found[0]}")


class Head(NamedTuple):
    """The first rows of a source."""

    rows: list[dict[str, Any]]
    """As ROWS has them."""
    formats: tuple[str, ...]
    """Names of the formats found."""
    unused: tuple[str, ...]
    """Columns that are not read."""


def head(source: Source, count: int) -> Head:
    """Return the first `count` rows, their formats, and the columns that are not read.

    Raises:
        UserError: there are no rows, or no row has a known format.
    """
    found = list(islice(chain.from_iterable(read(source.filesystem, piece, ()) for piece in source.pieces), count))
    if not found:
        raise UserError(f"{source.name} holds no rows; correct input in [preprocess], or pass --input.")
    formats, columns, problems = set(), set(), Counter[str]()
    for row in found:
        try:
            values = parsed(row)
            columns |= set(values)
            formats.add(format_of(values))
        except BadRow as bad:
            problems[str(bad)] += 1
    if not formats:
        problem = problems.most_common(1)[0][0]
        if problem == NO_FORMAT:
            problem = f"its columns are {', '.join(sorted(columns))}; rename them to {WANTED}"
        raise UserError(f"no row of {source.name} can be used: {problem}; or pass another --input.")
    used = frozenset().union(*(one.columns for one in formats))
    return Head(
        [_checked(row) for row in found], tuple(sorted(one.name for one in formats)), tuple(sorted(columns - used))
    )


def dataset(sources: list[Source], seed: int = 0, report: Callable[..., Any] | None = None) -> ray.data.Dataset:
    """All rows of all sources, as ROWS has them, in no particular order.

    Every task calls `report(rows_read=…, bytes_read=…)` with what it has read: rows, and bytes of the files.
    """

    def read_pieces(pieces: pa.Table) -> Iterator[pa.Table]:
        for piece in [Piece(**piece) for piece in pieces.to_pylist()]:
            rows, source = 0, sources[piece.source]
            checked = map(_checked, read(source.filesystem, piece))
            for batch in _batches(_copied(checked, piece.source, source.weight, seed)):
                rows += len(batch)
                yield batch
            if report:
                report(rows_read=rows, bytes_read=piece.stop - piece.start)

    return a_task_each(*sources).map_batches(read_pieces, batch_size=None, batch_format="pyarrow")


def _copied(rows: Iterable[dict[str, Any]], source: int, weight: float, seed: int) -> Iterator[dict[str, Any]]:
    """Yield each row `weight` times on average. A hash of its content decides whether it gets one copy more."""
    for row in rows:
        digest = hashlib.blake2b(row["row"], digest_size=8, key=str(seed).encode(), person=b"mix").digest()
        copies = 1 if row["problem"] else int(weight + int.from_bytes(digest) / 2**64)
        for copy in range(copies):
            yield row | {"source": source, "copy": copy}


def a_task_each(*sources: Source) -> ray.data.Dataset:
    """The pieces, each of which is read by a task of its own."""
    pieces = [
        piece._replace(source=number)._asdict() for number, source in enumerate(sources) for piece in source.pieces
    ]
    return ray.data.from_items(pieces, override_num_blocks=len(pieces))


def places(partitions: int) -> pa.Array:
    """A value for each partition, which a groupby with as many partitions gives a task of its own.

    Ray hashes the values, so their numbers would collide: some tasks had two or three partitions to write, some none.
    """
    found: dict[int, pa.Table] = {}
    candidates = partitions
    while len(found) < partitions:
        candidates *= 4
        values = pa.table({"place": pa.array(range(candidates), pa.int32())})
        found = partition(values, "place", partitions)
    return pa.array([found[task]["place"][0].as_py() for task in range(partitions)], pa.int32())


def assign(rows: pa.Table, seed: int, places: pa.Array) -> pa.Table:
    """`rows` with their `key`, a hash of seed and content, the `partition` that the key falls into, and its `place`.

    To order rows by such a key is to shuffle them all, and needs no row to know of another.
    """
    keys = [
        hashlib.blake2b(row, digest_size=16, key=str(seed).encode(), salt=copy.to_bytes(2)).digest()
        for row, copy in zip(rows["row"].to_pylist(), rows["copy"].to_pylist(), strict=True)
    ]
    numbers = pa.array([int.from_bytes(key[:8]) % len(places) for key in keys], pa.int32())
    columns = {"key": pa.array(keys, pa.binary(16)), "partition": numbers, "place": places.take(numbers)}
    return pa.table(dict(zip(rows.column_names, rows.columns, strict=True)) | columns)


def list_files(filesystem: pyarrow.fs.FileSystem, path: str) -> list[pyarrow.fs.FileInfo]:
    """A file, what is in a folder itself, or what a glob matches."""
    info = filesystem.get_file_info(path)
    if info.type == pyarrow.fs.FileType.Directory:
        return filesystem.get_file_info(pyarrow.fs.FileSelector(path))
    wildcard = re.search(r"[*?[]", path)
    if info.is_file or not wildcard:
        return [info]
    base = path[: wildcard.start()].rpartition("/")[0]
    recursive = "/" in path[wildcard.start() :]
    selector = pyarrow.fs.FileSelector(base, recursive=recursive, allow_not_found=True)
    # a leading slash makes the match one of whole paths
    pattern = f"/{path.lstrip('/')}"
    return [
        info for info in filesystem.get_file_info(selector) if PurePosixPath(f"/{info.path.lstrip('/')}").match(pattern)
    ]


def read(filesystem: pyarrow.fs.FileSystem, piece: Piece, columns: tuple[str, ...] = COLUMNS) -> Iterator[Found]:
    """The rows of one piece; of parquet these columns alone, or all where there is none of them.

    Raises:
        UserError: the file is broken.
    """
    with filesystem.open_input_file(piece.path) as file:
        if not piece.path.endswith(".parquet"):
            yield from _read_lines(file, piece)
            return
        try:
            yield from _read_row_groups(file, piece, columns)
        except pa.ArrowInvalid as error:
            raise UserError(f"{piece.path} is not a sound parquet file ({error}); replace or remove it.") from None


def _read_lines(file: pa.NativeFile, piece: Piece) -> Iterator[bytes]:
    lines = io.BufferedReader(file)
    if piece.start:
        lines.seek(piece.start - 1)
        lines.readline()  # the rest of a line that began in the piece before
    while lines.tell() < piece.stop and (line := lines.readline()):
        if line := line.strip():
            yield line


def _read_row_groups(file: pa.NativeFile, piece: Piece, wanted: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    parquet = pq.ParquetFile(file)
    groups = [
        group
        for group in range(parquet.num_row_groups)
        if piece.start <= _first_byte(parquet.metadata.row_group(group)) < piece.stop
    ]
    # other columns are not read; where none of ours is there, the rejected rows show what is
    columns = [name for name in wanted if name in parquet.schema_arrow.names] or None
    for batch in parquet.iter_batches(PARQUET_ROWS, row_groups=groups, columns=columns):
        yield from batch.to_pylist()


def _first_byte(group: pq.RowGroupMetaData) -> int:
    column = group.column(0)
    return column.dictionary_page_offset or column.data_page_offset


def _checked(found: Found) -> dict[str, Any]:
    """A row of ROWS: the same conversation gives the same bytes, whatever file it came from."""
    try:
        return {"row": to_json(example(parsed(found))), "problem": None}
    except BadRow as bad:
        return {"row": raw(found), "problem": str(bad)}


def raw(found: Found) -> bytes:
    """A row as the people who wrote it will know it again."""
    return found if isinstance(found, bytes) else json.dumps(found, default=str).encode()


def parsed(found: Found) -> dict[str, Any]:
    """What a row has in its columns.

    Raises:
        BadRow: a line is no JSON object.
    """
    if isinstance(found, dict):
        return without_nulls(found)
    try:
        row = json.loads(found)
    except (ValueError, RecursionError):
        raise BadRow("not valid JSON") from None
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    return row


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[pa.Table]:
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += len(row["row"])
        if size >= BATCH_BYTES:
            yield pa.Table.from_pylist(batch, ROWS)
            batch, size = [], 0
    if batch:
        yield pa.Table.from_pylist(batch, ROWS)
