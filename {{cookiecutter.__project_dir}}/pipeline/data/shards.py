"""Turns one partition of the rows into its shards: sorted, tokenised, packed, written. This is what workers run."""

import functools
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

from pipeline.data.conversations import NOT_TRAINED, Tokenize, padding_id
from pipeline.data.output import Output
from pipeline.data.packing import pack

SLICE_BYTES = 2**21  # of text, tokenised together: meanwhile its tokens take thirty times the text's memory
ROW_GROUP_TOKENS = 2**20  # what training reads at once


@dataclass(frozen=True)
class Plan:
    """What decides, beside rows and tokenizer, what the shards hold. `output` is a path or URI."""

    output: str
    sequence_length: int
    eval_share: float
    seed: int
    partitions: int
    deduplicate: bool = False


class Shard(BaseModel):
    """One parquet file; `sha256` is over its columns' values, not over how parquet stores them."""

    name: str
    rows: int
    documents: int
    cut_documents: int
    tokens: int
    trained_tokens: int
    lengths: dict[int, int]
    """Histogram of tokens per document: upper bounds, which are powers of two, and counts."""
    sha256: str


class Partition(BaseModel):
    """What became of one partition of the rows."""

    number: int
    rows: int
    duplicates: int
    """Rows left out because another one is identical."""
    rejected: dict[str, int]
    sources: dict[int, dict[str, int]]
    """Documents, tokens and trained tokens of each input, by its number."""
    train: Shard | None
    eval: Shard | None


def held_out(row: bytes, share: float) -> bool:
    """Whether a row is kept for evaluation: its content alone decides, so copies of it are on the same side."""
    digest = hashlib.blake2b(row, digest_size=8, person=b"evaluation").digest()
    return int.from_bytes(digest) < share * 2**64


@functools.cache
def fetch(shared: ObjectRef) -> Tokenize:
    """What the driver loaded, unpacked once in each worker process: no worker asks a hub, all have the same."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core; the others' are taken
    return ray.get(shared)


def write(rows: pa.Table, plan: Plan, shared: ObjectRef, report: Callable[..., Any]) -> pa.Table:
    """Write the shards of one partition; returns one row with its `summary`, a Partition as JSON.

    `shared` refers to a Tokenize. Each slice that is done calls `report(rows_packed=…)`.

    Raises:
        UserError: there is no room on the disk.
    """
    number, read = rows["partition"][0].as_py(), len(rows)
    rows = rows.sort_by("key")
    if plan.deduplicate:
        rows = _without_duplicates(rows)
    tokenize = fetch(shared)
    documents = _documents(rows, tokenize, report)
    pad_id = padding_id(tokenize.tokenizer)
    good = pc.is_null(documents["problem"])
    evaluated = pa.array([held_out(row, plan.eval_share) for row in rows["row"].to_pylist()], pa.bool_())
    evaluated = evaluated.take(documents["row"].combine_chunks())
    bad = documents.filter(pc.invert(good))
    rejected = _reject(rows["row"].take(bad["row"]), bad["problem"], plan, number)
    name = f"part-{number:05d}.parquet"
    partition = Partition(
        number=number,
        rows=read,
        duplicates=read - len(rows),
        rejected=rejected,
        sources=_by_source(documents.filter(good), rows["source"]),
        train=_write_shard(documents.filter(pc.and_not(good, evaluated)), plan, pad_id, f"train/{name}"),
        eval=_write_shard(documents.filter(pc.and_(good, evaluated)), plan, pad_id, f"eval/{name}"),
    )
    return pa.table({"summary": [partition.model_dump_json()]})


def _by_source(documents: pa.Table, sources: pa.ChunkedArray) -> dict[int, dict[str, int]]:
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


def _without_duplicates(rows: pa.Table) -> pa.Table:
    """Return rows without repeated keys. Identical rows have the same key, and are next to each other."""
    keys = rows["key"].combine_chunks()
    return rows.filter(pa.concat_arrays([pa.array([True]), pc.not_equal(keys[1:], keys[:-1])]))


def _documents(rows: pa.Table, tokenize: Tokenize, report: Callable[..., Any]) -> pa.Table:
    made, first = [], 0
    for part in slices(rows):
        documents = tokenize(part)
        numbers = pc.add(documents["row"], pa.scalar(first, pa.int32()))
        made.append(documents.set_column(documents.schema.get_field_index("row"), "row", numbers))
        first += len(part)
        report(rows_packed=len(part))
    return pa.concat_tables(made)


def slices(rows: pa.Table) -> Iterator[pa.Table]:
    """`rows` in order, in parts of about SLICE_BYTES of text, and of one row at least."""
    text = np.cumsum(pc.binary_length(rows["row"]).to_numpy())
    bounds = [0, *(np.flatnonzero(np.diff(text // SLICE_BYTES)) + 1), len(rows)]
    for start, stop in pairwise(bounds):
        yield rows.slice(start, stop - start)


def _reject(rows: pa.ChunkedArray, problems: pa.ChunkedArray, plan: Plan, number: int) -> dict[str, int]:
    """Write bad rows aside, each with its reason; returns how many there are of each reason."""
    pairs = list(zip(rows.to_pylist(), problems.to_pylist(), strict=True))
    if pairs:
        lines = [json.dumps({"problem": problem, "row": row.decode(errors="replace")}) for row, problem in pairs]
        Output(plan.output).save(f"rejected/part-{number:05d}.jsonl", "".join(f"{line}\n" for line in lines).encode())
    return dict(Counter(problem for _, problem in pairs))


def _write_shard(documents: pa.Table, plan: Plan, pad_id: int, name: str) -> Shard | None:
    if not len(documents):
        return None
    packed = pack(documents, plan.sequence_length, pad_id)
    columns = [column.combine_chunks().flatten().to_numpy() for column in packed.columns]
    buffer = pa.BufferOutputStream()
    pq.write_table(packed, buffer, compression="zstd", row_group_size=max(1, ROW_GROUP_TOKENS // plan.sequence_length))
    Output(plan.output).save(name, buffer.getvalue())
    return Shard(
        name=name.rpartition("/")[2],
        rows=len(packed),
        documents=len(documents),
        cut_documents=pc.sum(documents["cut"]).as_py(),
        tokens=pc.sum(pc.list_value_length(documents["input_ids"])).as_py(),
        trained_tokens=int(np.count_nonzero(columns[1] != NOT_TRAINED)),
        lengths=_lengths(documents),
        sha256=_hash(columns),
    )


def _lengths(documents: pa.Table) -> dict[int, int]:
    lengths = pc.list_value_length(documents["input_ids"]).to_numpy()
    bounds, counts = np.unique(2 ** np.ceil(np.log2(lengths)).astype(int), return_counts=True)
    return dict(zip(bounds.tolist(), counts.tolist(), strict=True))


def _hash(columns: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for column in columns:
        digest.update(column.data)
    return digest.hexdigest()
