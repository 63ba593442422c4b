"""Reads the packed rows that `preprocess` wrote. The row at a position depends only on the position and the seed."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import torch
from pydantic import BaseModel

from raymill import state_files
from raymill.data.options import Task
from raymill.data.tokenization import NOT_TRAINED
from raymill.errors import UserError
from raymill.settings import inv
from raymill.training import storage

AGAIN = f"Run: {inv('submit preprocess -- --overwrite')}"
COLUMNS = ("input_ids", "labels", "position_ids")
COLUMNS_OF_TASK: dict[Task, tuple[str, ...]] = {
    "supervised": COLUMNS,
    "preference": COLUMNS,
    "unpaired_preference": (*COLUMNS, "is_good"),
}

Arrays = dict[str, np.ndarray]
"""Each column of packed rows as an int32 array of shape (rows, sequence_length)."""

Batch = dict[str, torch.Tensor]
"""Columns of packed rows as int64 tensors of shape (rows, sequence_length), and `document_starts`, an int32 tensor of
shape (rows, documents): where each document starts in its row, and sequence_length where a row has fewer documents.
With a reference model, also `reference`: a float32 tensor of shape (rows, views, documents), see `Objective.views`."""


class ShardFile(BaseModel):
    """One parquet file of a split."""

    name: str
    rows: int


class Split(BaseModel):
    """The training or the evaluation rows."""

    files: list[ShardFile]
    rows: int
    documents: int = 0
    good_documents: int | None = None
    """None: the answers are not rated."""


class TokenizerRecord(BaseModel):
    """The tokenizer with which `preprocess` made the rows."""

    model: str
    hash: str
    vocabulary: int
    chat_template: str | None
    eos_ids: list[int] = []


class Manifest(BaseModel):
    """The part of preprocess's manifest.json that training reads."""

    sequence_length: int
    content_hash: str
    tokenizer: TokenizerRecord
    task: Task = "supervised"
    largest_id: int | None = None
    """Largest token id in the rows. None: an earlier version of `preprocess` wrote them."""
    train: Split
    eval: Split


def read_manifest(folder: str) -> Manifest:
    """Return the manifest of the packed data in `folder`, a path or URI.

    Raises:
        UserError: there is no manifest, or it is damaged.
    """
    text = storage.read_text(f"{folder}/manifest.json")
    if text is None:
        raise UserError(f"no packed data in {folder}. Run: {inv('submit preprocess')}")
    return state_files.parse_or_refuse(text, Manifest, f"{folder}/manifest.json", AGAIN)


class PackedRows:
    """The packed rows of one split.

    Position p is row p % len(self) of epoch p // len(self). With a seed, each epoch shuffles the order of the
    row groups and of the rows within each group. At most two row groups are cached at a time.
    """

    def __init__(self, folder: str, split: Literal["train", "eval"], seed: int | None = None) -> None:
        manifest = read_manifest(folder)
        shards, self._columns = getattr(manifest, split).files, COLUMNS_OF_TASK[manifest.task]
        filesystem, path = pyarrow.fs.FileSystem.from_uri(folder)
        files = [f"{path}/{split}/{shard.name}" for shard in shards]
        self._groups = [group for file in files for group in _row_groups(file, filesystem)]
        self._sizes = np.array([group.row_groups[0].num_rows for group in self._groups], dtype=np.int64)
        self._files = [group.path.rpartition("/")[2] for group in self._groups]
        before = (self._sizes.cumsum() - self._sizes).tolist()
        first: dict[str, int] = {}
        self._starts = [start - first.setdefault(file, start) for file, start in zip(self._files, before, strict=True)]
        self._before = before
        self.reference: np.ndarray | None = None
        """Log-probabilities of shape (rows, views, documents), with rows in the order of the files."""
        self._seed = seed
        self._read_group = lru_cache(maxsize=2)(self._read_group)  # two, because a batch may span two groups
        if len(self) != sum(shard.rows for shard in shards):
            raise UserError(
                f"{folder}/{split} does not hold the rows that its manifest lists. Run: {inv('submit preprocess')}"
            )

    def __len__(self) -> int:
        return int(self._sizes.sum())

    def read(self, first: int, count: int) -> Batch:
        """Return the rows at positions first .. first + count - 1."""
        pieces = [
            {name: array[rows] for name, array in self._read_group(group).items()}
            for group, rows in self._locate(first, count)
        ]
        batch = as_batch({name: np.concatenate([piece[name] for piece in pieces]) for name in self._columns})
        if self.reference is not None:
            located = [self._before[group] + rows for group, rows in self._locate(first, count)]
            batch["reference"] = _of_documents(self.reference[np.concatenate(located)], batch["document_starts"])
        return batch

    def names(self, first: int, count: int) -> list[str]:
        """Return the names of the rows at these positions, as FILE:ROW. Rows are counted from 0."""
        return [
            f"{self._files[group]}:{self._starts[group] + row}"
            for group, rows in self._locate(first, count)
            for row in rows
        ]

    def _locate(self, first: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each row group that these positions touch, and the numbers of the rows in the group."""
        while count:
            epoch, offset = divmod(first, len(self))
            groups = self._order(len(self._groups), epoch)
            ends = self._sizes[groups].cumsum()
            slot = int(ends.searchsorted(offset, side="right"))
            group, end = int(groups[slot]), int(ends[slot])
            rows = self._order(self._sizes[group], epoch, group)[offset - end :][:count]
            yield group, rows
            first, count = first + len(rows), count - len(rows)

    def _order(self, size: int, *where: int) -> np.ndarray:
        return np.arange(size) if self._seed is None else np.random.default_rng([self._seed, *where]).permutation(size)

    def _read_group(self, group: int) -> Arrays:
        with state_files.reading_parquet(self._groups[group].path, AGAIN):
            return as_arrays(self._groups[group].to_table(columns=list(self._columns)))


def _row_groups(file: str, filesystem: pyarrow.fs.FileSystem) -> list[pa.dataset.ParquetFileFragment]:
    """Return the row groups of a parquet file.

    Raises:
        DamagedFile: the file is missing or damaged.
    """
    checked = pa.dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
    parquet = pa.dataset.ParquetFileFormat(default_fragment_scan_options=checked)
    with state_files.reading_parquet(file, AGAIN):
        return parquet.make_fragment(file, filesystem).split_by_row_group()


def as_arrays(table: pa.Table) -> Arrays:
    """Return the columns of packed rows, which are fixed-size lists, as arrays."""
    return {
        name: table[name].combine_chunks().flatten().to_numpy().reshape(len(table), -1) for name in table.column_names
    }


def as_batch(arrays: Arrays) -> Batch:
    """Return the arrays as int64 tensors, because torch's cross-entropy needs int64 labels. Add `document_starts`."""
    starts = torch.from_numpy(_document_starts(arrays["position_ids"]))
    return {name: torch.from_numpy(array).long() for name, array in arrays.items()} | {"document_starts": starts}


def _document_starts(positions: np.ndarray) -> np.ndarray:
    """Return where documents start. The number of columns is a power of two, so that few different shapes occur."""
    starts = positions == 0
    columns = 1 << (int(starts.sum(axis=1).max()) - 1).bit_length()
    order = np.argsort(~starts, axis=1, kind="stable")[:, :columns]
    return np.where(np.take_along_axis(starts, order, axis=1), order, positions.shape[1]).astype(np.int32)


def _of_documents(values: np.ndarray, starts: torch.Tensor) -> torch.Tensor:
    """Return values of shape (rows, views, documents), with as many documents as the batch has."""
    columns = starts.shape[1]
    wide = np.pad(values, ((0, 0), (0, 0), (0, max(0, columns - values.shape[2]))))
    return torch.from_numpy(np.ascontiguousarray(wide[:, :, :columns]))


def trained_tokens(batch: Batch) -> torch.Tensor:
    """Return the number of tokens with a loss. A row's first token has none, because nothing predicts it."""
    return (batch["labels"][:, 1:] != NOT_TRAINED).sum()
