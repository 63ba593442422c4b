"""The table of chunks and their vectors, in LanceDB: a folder, here or on S3, with a version for every change."""

import asyncio
import json
import os
import warnings
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

os.environ.setdefault("LANCEDB_LOG", "error")  # read at its import; it warns of each table that it makes
import lancedb
import pyarrow as pa
from lancedb.index import IvfFlat

from pipeline.rag.documents import CHUNKS
from settings import UserError

warnings.filterwarnings("ignore", "lancedb fork support")  # what Ray forks becomes another program at once

TABLE = "chunks"
INDEXED_FROM = 100_000  # chunks; fewer are all compared with the question within milliseconds
IDS_AT_ONCE = 1000  # in one condition


class Recipe(NamedTuple):
    """How the vectors of a table were made; a question's vector must be made so too."""

    model: str
    """The embedding model, as settings.toml names it."""
    chunk_tokens: int
    chunk_overlap: int


class Found(NamedTuple):
    """A chunk, and how near it is to a question."""

    document: str
    text: str
    score: float


class Writer:
    """The one writer of a table. What it has committed stays, whatever happens after it."""

    def __init__(self, location: str, source: str, recipe: Recipe, dimension: int, *, fresh: bool) -> None:
        """Open the table in the folder or URI `location` for the documents of `source`, or make it; `fresh`: anew.

        Raises:
            UserError: the table's vectors were made in another way.
        """
        columns = [pa.field("source", pa.string()), *CHUNKS, pa.field("vector", pa.list_(pa.float32(), dimension))]
        self._schema = pa.schema(columns, metadata={"recipe": json.dumps(recipe._asdict())})
        self._source = source
        database = lancedb.connect(location, storage_options=_storage_options())
        if fresh or TABLE not in database.list_tables().tables:
            self._table = database.create_table(TABLE, schema=self._schema, mode="overwrite")
            return
        self._table = database.open_table(TABLE)
        made = _recipe(self._table.schema)
        for key, was in made._asdict().items():
            if was != getattr(recipe, key):
                raise UserError(
                    f"the index in {location} was made with {key} = {was}, not {getattr(recipe, key)}: go on with "
                    "that, take another --index, or make it anew with --fresh."
                )

    def known(self) -> dict[str, str]:
        """The hash of each document of the source, by its id."""
        first = self._table.search().where(f"source = {_quote(self._source)} AND chunk = 0")
        rows = first.select(["document", "hash"]).limit(self._table.count_rows() or 1).to_arrow()
        return dict(zip(rows["document"].to_pylist(), rows["hash"].to_pylist(), strict=True))

    def commit(self, chunks: pa.Table, changed: list[str]) -> None:
        """Add chunks with their vectors in one step; those of `changed` documents take the place of their old ones."""
        whole = chunks.add_column(0, "source", pa.array([self._source] * len(chunks), pa.string()))
        whole = whole.cast(self._schema)
        if not changed:
            self._table.add(whole)
            return
        merge = self._table.merge_insert(["source", "document", "chunk"])
        merge = merge.when_matched_update_all().when_not_matched_insert_all()
        merge.when_not_matched_by_source_delete(self._are(changed)).execute(whole)

    def remove(self, documents: Iterable[str]) -> None:
        """Remove documents of the source."""
        rest = sorted(documents)
        while rest:
            self._table.delete(self._are(rest[:IDS_AT_ONCE]))
            rest = rest[IDS_AT_ONCE:]

    def finish(self) -> int:
        """Put the small pieces together, and keep what speeds up the search in a large table; returns the chunks."""
        count = self._table.count_rows()
        if count >= INDEXED_FROM and not self._table.list_indices():
            self._table.create_index("vector", config=IvfFlat(distance_type="dot"))
        self._table.optimize()
        return count

    def _are(self, documents: list[str]) -> str:
        return f"source = {_quote(self._source)} AND document IN ({', '.join(map(_quote, documents))})"


class Reader:
    """A table as those read it who answer from it: always its latest version."""

    def __init__(self, table: Any, recipe: Recipe) -> None:
        self._table = table
        self.recipe = recipe

    @classmethod
    async def open(cls, location: str) -> "Reader":
        """Raises: `UserError` when no index is there."""
        latest = timedelta(0)
        options = _storage_options()
        database = await lancedb.connect_async(location, storage_options=options, read_consistency_interval=latest)
        if TABLE not in (await database.list_tables()).tables:
            raise UserError(f"there is no index in {location}; make it with: inv submit embed")
        table = await database.open_table(TABLE)
        return cls(table, _recipe(await table.schema()))

    async def search(self, vector: list[float], count: int) -> list[Found]:
        """The chunks nearest to a vector, the nearest first; their score is the cosine."""
        query = self._table.query().nearest_to(vector).distance_type("dot").limit(count)
        rows = await query.select(["document", "text", "_distance"]).to_list()
        return [Found(row["document"], row["text"], 1 - row["_distance"]) for row in rows]


def search_all(location: str, vectors: Iterable[Any], count: int) -> list[list[Found]]:
    """The chunks nearest to each of the vectors."""

    async def search() -> list[list[Found]]:
        reader = await Reader.open(location)
        return [await reader.search(vector.tolist(), count) for vector in vectors]

    return asyncio.run(search())


def _recipe(schema: pa.Schema) -> Recipe:
    return Recipe(**json.loads(schema.metadata[b"recipe"]))


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _storage_options() -> dict[str, str]:
    """An S3 that is not Amazon's, such as that of tests, may speak plain HTTP."""
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    return {"allow_http": "true"} if plain else {}
