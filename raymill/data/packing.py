"""Pack documents of different lengths into rows of equal length."""

from bisect import bisect_left, insort

import numpy as np
import pyarrow as pa

from raymill.data.options import Task
from raymill.data.tokenization import NOT_TRAINED


def pack(table: pa.Table, sequence_length: int, pad_id: int, task: Task = "supervised") -> pa.Table:
    """Return the documents in `table`, packed into rows.

    Args:
        table: Columns `input_ids` and `labels`, which are lists of at most `sequence_length` tokens, and `is_good` for
            the task unpaired_preference.
        sequence_length: Tokens in each row.
        pad_id: The token that fills the rest of a row.
        task: For preference, successive documents are pairs, which stay in one row, side by side.

    Returns:
        `input_ids`, `labels` and `position_ids`, each int32 (rows, sequence_length). `position_ids` restart at 0 for
        each document and for the padding, so that attention does not cross document boundaries. No document is
        split, and documents keep their order within a row. Empty documents are left out. Tokens of good answers have
        1 in `is_good`, and others 0.
    """
    together = 2 if task == "preference" else 1
    lengths = _values(table["input_ids"].combine_chunks().value_lengths())
    grouped = lengths.reshape(-1, together)
    rows, offsets, used = _best_fit(grouped.sum(1), sequence_length)
    rows = np.repeat(rows, together)
    offsets = (offsets[:, None] + np.cumsum(grouped, axis=1) - grouped).reshape(-1)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    target = np.repeat(rows * sequence_length + offsets, lengths) + within

    shape = (len(used), sequence_length)
    positions = np.arange(sequence_length, dtype=np.int32) - used[:, None].astype(np.int32)
    packed = {
        "input_ids": np.full(shape, pad_id, dtype=np.int32),
        "labels": np.full(shape, NOT_TRAINED, dtype=np.int32),
        "position_ids": positions,
    }
    packed["input_ids"].reshape(-1)[target] = _flatten(table["input_ids"])
    packed["labels"].reshape(-1)[target] = _flatten(table["labels"])
    packed["position_ids"].reshape(-1)[target] = within
    if task == "unpaired_preference":
        packed["is_good"] = np.zeros(shape, dtype=np.int32)
        packed["is_good"].reshape(-1)[target] = np.repeat(_values(table["is_good"].combine_chunks()), lengths)
    return pa.table(
        {
            name: pa.FixedSizeListArray.from_arrays(column.reshape(-1), sequence_length)
            for name, column in packed.items()
        }
    )


def _best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place each document into the fullest row that has room for it, or into a new row.

    Documents are not sorted by length first, so the rows are as shuffled as the documents.

    Returns:
        The row and the offset of each document, and the number of used tokens in each row.
    """
    rows, offsets = np.zeros(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted
    count = 0
    for document, length in enumerate(lengths.tolist()):
        if not length:
            continue
        fit = bisect_left(open_rows, (length, -1))
        if fit < len(open_rows):
            free, row = open_rows.pop(fit)
        else:
            free, row, count = capacity, count, count + 1
        rows[document], offsets[document] = row, capacity - free
        if free > length:
            insort(open_rows, (free - length, row))
    used = np.full(count, capacity, dtype=np.int64)
    for free, row in open_rows:
        used[row] -= free
    return rows, offsets, used


def _flatten(column: pa.ChunkedArray) -> np.ndarray:
    """Return the concatenated elements of a column of lists."""
    return _values(column.combine_chunks().flatten())


def _values(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)
