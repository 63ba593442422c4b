"""The index: a LanceDB table of chunks and their vectors, in a local folder or on S3. Every change adds a version."""

import asyncio
import json
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

os.environ.setdefault("LANCEDB_LOG", "error")  # read by the import; otherwise each new table logs a warning
import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import FTS, IvfFlat

from raymill.data.files import object_store_options
from raymill.errors import UserError
from raymill.rag.answers import ScoredChunk
from raymill.rag.documents import CHUNKS
from raymill.settings import inv

warnings.filterwarnings("ignore", "lancedb fork support")  # Ray's forks call exec at once, which is safe

TABLE = "chunks"
CONFIG_KEY = "recipe"  # key in the table's metadata
# ICU also finds the words of languages that put no spaces between them, such as Chinese. `split` divides names such as
# os.path into their parts; without it, half as many names were found.
FULL_TEXT = FTS(base_tokenizer="icu/split")
MIN_INDEXED_CHUNKS = 100_000  # with fewer chunks, an exhaustive search takes milliseconds
MAX_IDS = 1000  # ids in one SQL condition


class IndexConfig(NamedTuple):
    """How an index was built. Questions must be embedded with the same model."""

    model: str
    """The embedding model, as settings.toml names it."""
    chunk_tokens: int
    chunk_overlap: int


class Writer:
    """Writes to an index. Only one writer may use an index at a time. Committed changes survive a crash."""

    def __init__(
        self,
        location: str,
        source: str,
        config: IndexConfig,
        dimension: int,
        *,
        fresh: bool,
        confirm: Callable[[], None],
    ) -> None:
        """Open or create the index at `location`, a folder or URI, for the documents of `source`.

        The vectors have `dimension` numbers. With `fresh`, replace an existing index. `confirm` is called before each
        change, and raises an error if another writer may use the index.

        Raises:
            UserError: the index was built with a different configuration.
        """
        columns = [pa.field("source", pa.string()), *CHUNKS, pa.field("vector", pa.list_(pa.float32(), dimension))]
        self._schema = pa.schema(columns, metadata={CONFIG_KEY: json.dumps(config._asdict())})
        self._source, self._confirm = source, confirm
        database = lancedb.connect(location, storage_options=object_store_options())
        if fresh or TABLE not in database.list_tables().tables:
            self._table = database.create_table(TABLE, schema=self._schema, mode="overwrite")
            self._table.create_index("text", config=FULL_TEXT)
            return
        self._table = database.open_table(TABLE)
        for key, built_with in _config(self._table.schema)._asdict().items():
            if built_with != getattr(config, key):
                raise UserError(
                    f"the index in {location} was built with {key} = {built_with}, not {getattr(config, key)}. "
                    "Use that value or another --index, or rebuild the index with --fresh."
                )

    def known(self) -> dict[str, str]:
        """Return the hashes of the source's documents in the index, keyed by id."""
        first = self._table.search().where(f"source = {_quote(self._source)} AND chunk = 0")
        rows = first.select(["document", "hash"]).limit(self._table.count_rows() or 1).to_arrow()
        return dict(zip(rows["document"].to_pylist(), rows["hash"].to_pylist(), strict=True))

    def commit(self, chunks: pa.Table, changed: list[str]) -> None:
        """Add chunks with their vectors in one transaction. They replace all old chunks of `changed` documents."""
        self._confirm()
        rows = chunks.add_column(0, "source", pa.array([self._source] * len(chunks), pa.string()))
        rows = rows.cast(self._schema)
        if not changed:
            self._table.add(rows)
            return
        merge = self._table.merge_insert(["source", "document", "chunk"])
        merge = merge.when_matched_update_all().when_not_matched_insert_all()
        merge.when_not_matched_by_source_delete(self._condition(changed)).execute(rows)

    def remove(self, documents: Iterable[str]) -> None:
        """Remove documents of the source."""
        ids = sorted(documents)
        for first in range(0, len(ids), MAX_IDS):
            self._confirm()
            self._table.delete(self._condition(ids[first : first + MAX_IDS]))

    def finish(self) -> int:
        """Compact the table, and build or update its search indexes. Return the number of chunks.

        Until then, searches also scan the chunks that are not in an index yet.
        """
        self._confirm()
        count = self._table.count_rows()
        indexed = [column for each in self._table.list_indices() for column in each.columns]
        if "text" not in indexed:  # an earlier version of this project wrote the table
            self._table.create_index("text", config=FULL_TEXT)
        if count >= MIN_INDEXED_CHUNKS and "vector" not in indexed:
            self._table.create_index("vector", config=IvfFlat(distance_type="dot"))
        self._table.optimize()
        return count

    def _condition(self, documents: list[str]) -> str:
        return f"source = {_quote(self._source)} AND document IN ({', '.join(map(_quote, documents))})"


class Reader:
    """Reads the latest version of an index."""

    def __init__(self, table: Any, config: IndexConfig) -> None:
        self._table = table
        self.config = config

    @classmethod
    async def open(cls, location: str) -> "Reader":
        """Open the index in a folder or at a URI.

        Raises:
            UserError: there is no index.
        """
        latest = timedelta(0)
        options = object_store_options()
        database = await lancedb.connect_async(location, storage_options=options, read_consistency_interval=latest)
        if TABLE not in (await database.list_tables()).tables:
            raise UserError(f"no index in {location}. Run: {inv('submit embed')}")
        table = await database.open_table(TABLE)
        return cls(table, _config(await table.schema()))

    async def has_full_text(self) -> bool:
        """Return whether the index can be searched by words. One that an earlier version wrote cannot."""
        return any("text" in each.columns for each in await self._table.list_indices())

    async def search(self, vector: np.ndarray, count: int, question: str = "") -> list[ScoredChunk]:
        """Return the `count` chunks nearest to a vector, nearest first. The score is the cosine similarity.

        With a question, also search for its words with BM25, and return the `count` best chunks of both searches by
        reciprocal rank fusion: https://plg.uwaterloo.ca/~gvcormac/cormacksigir09-rrf.pdf
        """
        query = self._table.query().nearest_to(vector).distance_type("dot").limit(count)
        if question and await self.has_full_text():
            query = query.nearest_to_text(question)
        rows = await query.select(["document", "text", "vector"]).to_list()
        return [ScoredChunk(row["document"], row["text"], float(vector @ np.array(row["vector"]))) for row in rows]


def search_all(
    location: str, vectors: Sequence[np.ndarray] | np.ndarray, count: int, questions: Sequence[str] = ()
) -> list[list[ScoredChunk]]:
    """Return the `count` chunks that `Reader.search` finds for each vector, and for its question if there is one."""

    async def search() -> list[list[ScoredChunk]]:
        reader = await Reader.open(location)
        pairs = zip(vectors, questions or [""] * len(vectors), strict=True)
        return [await reader.search(vector, count, question) for vector, question in pairs]

    return asyncio.run(search())


def _config(schema: pa.Schema) -> IndexConfig:
    return IndexConfig(**json.loads(schema.metadata[CONFIG_KEY.encode()]))


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
