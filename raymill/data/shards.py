"""Write the shards of one partition: sort, tokenize, pack and save its rows. Workers run this code."""

import functools
import gc
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
from pydantic import BaseModel
from ray import ObjectRef

from raymill.data import samples
from raymill.data.filters.gate import Gate
from raymill.data.options import Task
from raymill.data.packed_folder import PackedFolder
from raymill.data.packing import pack
from raymill.data.samples import Samples
from raymill.data.shuffle import is_held_out
from raymill.data.tokenization import NOT_TRAINED, DocumentTokenizer
from raymill.data.tokenizer import padding_id

SLICE_BYTES = 2**21  # bytes of text to tokenize at once; the tokens take thirty times as much memory
ROW_GROUP_TOKENS = 2**20  # training reads one row group at a time


@dataclass(frozen=True)
class ShardPlan:
    """The settings that, together with the rows and the tokenizer, determine the content of the shards."""

    output: str
    """A path or URI."""
    sequence_length: int
    eval_share: float
    seed: int
    partitions: int
    deduplicate: bool = False
    task: Task = "supervised"
    sources: tuple[str, ...] = ()
    """Names of the inputs."""


class ShardSummary(BaseModel):
    """The name, counts and hash of one parquet file."""

    name: str
    rows: int
    documents: int
    cut_documents: int
    tokens: int
    trained_tokens: int
    good_documents: int | None
    """Number of good answers. None: the answers are not rated."""
    lengths: dict[int, int]
    """Histogram of tokens per document: maps upper bounds, which are powers of two, to counts."""
    largest_id: int
    """Largest token id in the rows, including the token that fills them."""
    sha256: str
    """Hash of the columns' values, not of their parquet encoding."""


class PartitionSummary(BaseModel):
    """The shards and counts of one partition."""

    number: int
    rows: int
    duplicates: int
    """Rows left out because an identical row is kept."""
    rejected: dict[str, int]
    """Bad rows, by reason."""
    dropped: dict[int, dict[str, int]] = {}
    """Maps the number of an input to its rows that filters dropped, by reason."""
    changed: int = 0
    """Rows that filters changed."""
    sources: dict[int, dict[str, int]]
    """Maps the number of an input to its counts of documents, tokens and trained tokens."""
    samples: Samples
    fast_documents: int
    """Documents that fastokens encoded."""
    train: ShardSummary | None
    eval: ShardSummary | None


def write(
    rows: pa.Table,
    plan: ShardPlan,
    tokenizer_ref: ObjectRef,
    use_fastokens: bool,
    report: Callable[..., Any],
    gate: Gate | None = None,
) -> pa.Table:
    """Write the shards of one partition. Return one row with the column `summary`, a PartitionSummary as JSON.

    `tokenizer_ref` refers to a DocumentTokenizer; see `fetch` for `use_fastokens`. After each slice, the function calls
    `report(rows_packed=…)`. `gate` decides which rows are dropped.

    Raises:
        UserError: the shards cannot be written, or the tokenizer raises a UserError.
    """
    number, read = rows["partition"][0].as_py(), len(rows)
    rows = rows.sort_by("key")
    dropped: dict[int, dict[str, int]] = {}
    if gate:
        gate.start_deciding()
    tokenizer = fetch(tokenizer_ref, use_fastokens)
    if gate:
        rows, dropped = _save_dropped(gate.decide(rows), plan, number)
    kept = len(rows)
    if plan.deduplicate:
        rows = _without_duplicates(rows)
    documents = _tokenize(rows, tokenizer, report)
    pad_id = padding_id(tokenizer.tokenizer)
    good = pc.is_null(documents["problem"])
    read_rows = pc.coalesce(rows["as_read"], rows["row"]).to_pylist()
    held_out = pa.array([is_held_out(row, plan.eval_share) for row in read_rows], pa.bool_())
    held_out = held_out.take(documents["row"].combine_chunks())
    bad = documents.filter(pc.invert(good))
    rejected = _save_rejected(rows["row"].take(bad["row"]), bad["problem"], plan, number)
    name, used = f"part-{number:05d}.parquet", documents.filter(good)
    trained = documents.filter(pc.and_not(good, held_out))
    partition = PartitionSummary(
        number=number,
        rows=read,
        duplicates=kept - len(rows),
        rejected=rejected,
        dropped=dropped,
        changed=len(rows) - rows["as_read"].null_count,
        sources=_count_by_source(used, rows["source"]),
        samples=samples.take(
            trained, rows["source"].take(trained["row"]).to_numpy(), tokenizer.tokenizer, plan.partitions
        ),
        fast_documents=pc.sum(documents["is_fast"]).as_py() or 0,  # filters may have dropped all rows
        train=_write_shard(trained, plan, pad_id, f"train/{name}"),
        eval=_write_shard(documents.filter(pc.and_(good, held_out)), plan, pad_id, f"eval/{name}"),
    )
    return pa.table({"summary": [partition.model_dump_json()]})


@functools.cache
def fetch(tokenizer_ref: ObjectRef, use_fastokens: bool) -> DocumentTokenizer:
    """Return the driver's tokenizer, unpickled once per worker process. fastokens may encode rows where it is exact.

    This way, no worker loads the tokenizer from the hub, and all workers use the same one.
    """
    # a task has one core; other tasks use the rest
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}
    tokenizer: DocumentTokenizer = ray.get(tokenizer_ref)
    if use_fastokens:
        tokenizer.use_fastokens()
    gc.collect()
    gc.freeze()  # collections would look at all that this process has imported, for a third of the time of a row
    return tokenizer


def slices(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield `rows` in order, in slices of about SLICE_BYTES of text, each with at least one row."""
    text = np.cumsum(pc.binary_length(rows["row"]).to_numpy())
    bounds = [0, *(np.flatnonzero(np.diff(text // SLICE_BYTES)) + 1), len(rows)]
    for start, stop in pairwise(bounds):
        yield rows.slice(start, stop - start)


def _without_duplicates(rows: pa.Table) -> pa.Table:
    """Return rows without repeated keys. Identical rows have the same key, and `rows` are sorted by key."""
    if not len(rows):
        return rows
    keys = rows["key"].combine_chunks()
    return rows.filter(pa.concat_arrays([pa.array([True]), pc.not_equal(keys[1:], keys[:-1])]))


def _tokenize(rows: pa.Table, tokenizer: DocumentTokenizer, report: Callable[..., Any]) -> pa.Table:
    tables, first = [], 0
    for part in slices(rows):
        documents = tokenizer(part.select(["row", "problem"]))
        numbers = pc.add(documents["row"], pa.scalar(first, pa.int32()))
        tables.append(documents.set_column(documents.schema.get_field_index("row"), "row", numbers))
        first += len(part)
        report(rows_packed=len(part))
    return pa.concat_tables(tables)


def _count_by_source(documents: pa.Table, sources: pa.ChunkedArray) -> dict[int, dict[str, int]]:
    origins = sources.take(documents["row"]).to_numpy()
    tokens = pc.list_value_length(documents["input_ids"]).to_numpy()
    labels = documents["labels"].combine_chunks()
    trained_so_far = np.cumsum(labels.flatten().to_numpy() != NOT_TRAINED)
    trained = np.diff(trained_so_far[np.cumsum(tokens) - 1], prepend=0)  # no document is empty
    return {
        int(source): {
            "documents": int((origins == source).sum()),
            "tokens": int(tokens[origins == source].sum()),
            "trained_tokens": int(trained[origins == source].sum()),
        }
        for source in np.unique(origins)
    }


def _save_rejected(rows: pa.ChunkedArray, problems: pa.ChunkedArray, plan: ShardPlan, number: int) -> dict[str, int]:
    """Save bad rows, each with the reason. Return the number of rows for each reason."""
    pairs = list(zip(rows.to_pylist(), problems.to_pylist(), strict=True))
    if pairs:
        lines = [json.dumps({"problem": problem, "row": row.decode(errors="replace")}) for row, problem in pairs]
        content = "".join(f"{line}\n" for line in lines).encode()
        PackedFolder(plan.output).save(f"rejected/part-{number:05d}.jsonl", content)
    return dict(Counter(problem for _, problem in pairs))


def _save_dropped(rows: pa.Table, plan: ShardPlan, number: int) -> tuple[pa.Table, dict[int, dict[str, int]]]:
    """Save the rows that filters drop. Return the others, and the counts of dropped rows by source and reason."""
    is_dropped = pc.is_valid(rows["dropped"])
    # copies are counted once
    gone = rows.filter(pc.and_(is_dropped, pc.equal(rows["copy"], 0)))
    if len(gone):
        saved = pa.table(
            {
                "reason": gone["dropped"],
                "key": [content.hex() for content in gone["content"].to_pylist()],
                "source": [plan.sources[one] for one in gone["source"].to_pylist()],
                "kept": pa.array([kept and kept.hex() for kept in gone["kept"].to_pylist()], pa.string()),
                "row": gone["row"].cast(pa.large_string()),
            }
        )
        buffer = pa.BufferOutputStream()
        pq.write_table(saved, buffer, compression="zstd")
        PackedFolder(plan.output).save(f"dropped/part-{number:05d}.parquet", buffer.getvalue())
    pairs = Counter(zip(gone["source"].to_pylist(), gone["dropped"].to_pylist(), strict=True))
    counts: dict[int, dict[str, int]] = {}
    for (source, reason), count in sorted(pairs.items()):
        counts.setdefault(source, {})[reason] = count
    return rows.filter(pc.invert(is_dropped)), counts


def _write_shard(documents: pa.Table, plan: ShardPlan, pad_id: int, name: str) -> ShardSummary | None:
    if not len(documents):
        return None
    packed = pack(documents, plan.sequence_length, pad_id, plan.task)
    columns = [column.combine_chunks().flatten().to_numpy() for column in packed.columns]
    buffer = pa.BufferOutputStream()
    group_rows = max(1, ROW_GROUP_TOKENS // plan.sequence_length)
    pq.write_table(
        packed,
        buffer,
        compression="zstd",
        row_group_size=group_rows,
        use_dictionary=False,  # it would take half of the time, for files of the same size
        write_statistics=False,  # nothing reads them, and the checksums do not cover them
        write_page_checksum=True,  # zstd decodes some damaged pages without an error
    )
    PackedFolder(plan.output).save(name, buffer.getvalue())
    return ShardSummary(
        name=name.rpartition("/")[2],
        rows=len(packed),
        documents=len(documents),
        cut_documents=pc.sum(documents["cut"]).as_py(),
        tokens=pc.sum(pc.list_value_length(documents["input_ids"])).as_py(),
        trained_tokens=int(np.count_nonzero(columns[1] != NOT_TRAINED)),
        good_documents=pc.sum(documents["is_good"]).as_py(),
        lengths=_length_histogram(documents),
        largest_id=int(columns[0].max()),
        sha256=_hash(columns),
    )


def _length_histogram(documents: pa.Table) -> dict[int, int]:
    lengths = pc.list_value_length(documents["input_ids"]).to_numpy()
    bounds, counts = np.unique(2 ** np.ceil(np.log2(lengths)).astype(int), return_counts=True)
    return dict(zip(bounds.tolist(), counts.tolist(), strict=True))


def _hash(columns: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for column in columns:
        digest.update(column.data)
    return digest.hexdigest()
