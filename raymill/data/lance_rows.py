"""Read the rows of a version of a Lance dataset, without those that are deleted."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raymill.data.files import object_store_options

if TYPE_CHECKING:
    from lancedb import AsyncTable


async def count(location: str, version: int | None) -> tuple[int, int, int]:
    """Return the number of a version, or of the current one, its number of rows, and its bytes.

    Raises:
        ValueError, RuntimeError: there is no such dataset or version.
    """
    table = await _open(location, version)
    stats: Any = await table.stats()
    return await table.version(), await table.count_rows(), max(1, stats["total_bytes"])


def read(location: str, version: int, first: int, stop: int, wanted: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Yield the rows [first, stop) in batches, with these columns, or with all if none of them exists."""

    async def scan() -> Any:
        table = await _open(location, version)
        query, names = table.query(), (await table.schema()).names
        if present := [name for name in wanted if name in names]:
            query = query.select(present)
        return await query.offset(first).limit(stop - first).to_batches()

    async def following(batches: Any) -> pa.RecordBatch | None:
        return await anext(batches, None)

    with asyncio.Runner() as runner:
        batches = aiter(runner.run(scan()))
        while (batch := runner.run(following(batches))) is not None:
            yield batch


async def _open(location: str, version: int | None) -> "AsyncTable":
    import lancedb  # only Lance datasets need it

    options = object_store_options()
    database = await lancedb.connect_async(location.rpartition("/")[0], storage_options=options)
    name = location.rpartition("/")[2].removesuffix(".lance")
    return await database.open_table(name, storage_options=options, location=location, version=version)
