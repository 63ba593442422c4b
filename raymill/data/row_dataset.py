"""Read the rows of all inputs as a streaming Ray dataset.

`ray.data.read_json` is not suitable: one broken line makes the whole file fail, rows with different columns make the
block fail, and only one task reads each file, however large the file is.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import ray.data

from raymill.data.file_formats import Piece, read
from raymill.data.filters.gate import Gate
from raymill.data.row_formats import columns_of
from raymill.data.row_sources import RowSource
from raymill.data.rows import ROWS, checked

BATCH_BYTES = 4 * 2**20  # bytes of rows in one batch


def dataset(
    sources: list[RowSource], seed: int = 0, report: Callable[..., Any] | None = None, gate: Gate | None = None
) -> ray.data.Dataset:
    """Return all rows of all sources with the schema ROWS, in no particular order. `gate` filters each row.

    After each piece, its task calls `report(rows_read=…, bytes_read=…)`. `bytes_read` is the size of the piece on disk.
    """

    def read_pieces(pieces: pa.Table) -> Iterator[pa.Table]:
        for piece in [Piece(**piece) for piece in pieces.to_pylist()]:
            count, source = 0, sources[piece.source]
            raw = read(source.files.filesystem, piece, columns_of(source.formats))
            rows = _with_copies((checked(row, source.formats) for row in raw), source.weight, seed)
            for batch in _batches(rows):
                found = gate.filter_rows(batch, piece.source) if gate else batch
                table = pa.Table.from_pylist(list(_repeat(found, piece.source)), ROWS)
                count += len(table)
                yield table
            if report:
                report(rows_read=count, bytes_read=piece.stop - piece.start)

    return one_task_per_piece(*sources).map_batches(read_pieces, batch_size=None, batch_format="pyarrow")


def one_task_per_piece(*sources: RowSource) -> ray.data.Dataset:
    """Return the pieces of all files as a dataset with one block per piece."""
    pieces = [
        piece._replace(source=number)._asdict() for number, source in enumerate(sources) for piece in source.pieces
    ]
    return ray.data.from_items(pieces, override_num_blocks=len(pieces))


def _with_copies(rows: Iterable[dict[str, Any]], weight: float, seed: int) -> Iterator[dict[str, Any]]:
    """Add to each row that is used the number of its copies: `weight` on average, and one for a bad row.

    A hash of the row decides whether a fractional weight is rounded up.
    """
    for row in rows:
        if copies := 1 if row["problem"] else _copies(row["row"], weight, seed):
            yield row | {"copies": copies}


def _repeat(rows: Iterable[dict[str, Any]], source: int) -> Iterator[dict[str, Any]]:
    """Yield the copies of each row, and a dropped row once."""
    for row in rows:
        for copy in range(1 if row.get("dropped") else row["copies"]):
            yield row | {"source": source, "copy": copy}


def _copies(row: bytes, weight: float, seed: int) -> int:
    if weight == int(weight):
        return int(weight)
    digest = hashlib.blake2b(row, digest_size=8, key=str(seed).encode(), person=b"mix").digest()
    return int(weight + int.from_bytes(digest) / 2**64)


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += len(row["row"])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
