"""Assign rows to partitions by a hash of seed and content: a global shuffle that needs no coordination."""

import hashlib

import pyarrow as pa
import pyarrow.compute as pc

from raymill.ray_support.private import data as private_data


def group_values(partitions: int) -> pa.Array:
    """Return one value per partition, such that a groupby on these values gives each partition its own task.

    Ray hashes the values. With the partitions' numbers as values, the hashes would collide: some tasks would write two
    or three partitions, and others none.
    """
    tables: dict[int, pa.Table] = {}
    candidates = partitions
    while len(tables) < partitions:
        candidates *= 4
        values = pa.table({"group": pa.array(range(candidates), pa.int32())})
        tables = private_data.partition(values, "group", partitions)
    return pa.array([tables[task]["group"][0].as_py() for task in range(partitions)], pa.int32())


def assign(rows: pa.Table, seed: int, groups: pa.Array) -> pa.Table:
    """Return `rows` with their `key`, a hash of seed and content, and with the `partition` and `group` of that key.

    `groups` is the result of `group_values`. Sorting the rows by `key` shuffles them. A row that filters changed keeps
    its place.
    """
    read = pc.coalesce(rows["as_read"], rows["row"])
    keys = [
        hashlib.blake2b(row, digest_size=16, key=str(seed).encode(), salt=copy.to_bytes(2)).digest()
        for row, copy in zip(read.to_pylist(), rows["copy"].to_pylist(), strict=True)
    ]
    partitions = pa.array([int.from_bytes(key[:8]) % len(groups) for key in keys], pa.int32())
    columns = {"key": pa.array(keys, pa.binary(16)), "partition": partitions, "group": groups.take(partitions)}
    return pa.table(dict(zip(rows.column_names, rows.columns, strict=True)) | columns)


def is_held_out(row: bytes, share: float) -> bool:
    """Return whether a row is held out for evaluation. Copies of a row share the result."""
    digest = hashlib.blake2b(row, digest_size=8, person=b"evaluation").digest()
    return int.from_bytes(digest) < share * 2**64
