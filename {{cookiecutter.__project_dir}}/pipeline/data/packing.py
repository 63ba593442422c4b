"""Packs documents of many lengths into rows of one length."""

from bisect import bisect_left, insort

import numpy as np
import pyarrow as pa

from pipeline.data.conversations import NOT_TRAINED


def pack(table: pa.Table, sequence_length: int, pad_id: int) -> pa.Table:
    """Packed rows of the documents in `table` (`input_ids` and `labels`, lists of at most `sequence_length`).

    Returns `input_ids`, `labels` and `position_ids`, each int32 (rows, sequence_length). `position_ids` restart
    at 0 for each document and for the padding, which is how attention keeps them apart. Documents are whole and
    keep their order within a row; one without tokens takes no room.
    """
    lengths = _values(table["input_ids"].combine_chunks().value_lengths())
    rows, offsets, used = _place(lengths, sequence_length)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    target = np.repeat(rows * sequence_length + offsets, lengths) + within

    shape = (len(used), sequence_length)
    positions = np.arange(sequence_length, dtype=np.int32) - used[:, None].astype(np.int32)
    packed = {
        "input_ids": np.full(shape, pad_id, dtype=np.int32),
        "labels": np.full(shape, NOT_TRAINED, dtype=np.int32),
        "position_ids": positions,
    }
    packed["input_ids"].reshape(-1)[target] = _flat(table["input_ids"])
    packed["labels"].reshape(-1)[target] = _flat(table["labels"])
    packed["position_ids"].reshape(-1)[target] = within
    return pa.table(
        {
            name: pa.FixedSizeListArray.from_arrays(column.reshape(-1), sequence_length)
            for name, column in packed.items()
        }
    )


def _place(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Online best fit: each document goes into the fullest row that still holds it, else into a new one.

    Online, not sorted by length first, so that the order of the rows stays as shuffled as that of the documents.
    Returns the row and the offset of each document, and how much of each row is used.
    """
    rows, offsets = np.zeros(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    count = 0
    for document, length in enumerate(lengths.tolist()):
        if not length:
            continue
        fit = bisect_left(room, (length, -1))
        if fit < len(room):
            free, row = room.pop(fit)
        else:
            free, row, count = capacity, count, count + 1
        rows[document], offsets[document] = row, capacity - free
        if free > length:
            insort(room, (free - length, row))
    used = np.full(count, capacity, dtype=np.int64)
    for free, row in room:
        used[row] -= free
    return rows, offsets, used


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    """The elements of a column of lists, one after another."""
    return _values(column.combine_chunks().flatten())


def _values(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)
