"""Find rows with nearly the same text, by MinHash signatures of their runs of words.

Bands of a signature only propose pairs: a row is left out if its similarity to a row that is *kept* reaches the
threshold. The rows are visited in the order of their content hashes, so the result depends on the rows alone.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from raymill.data.filters import word_runs
from raymill.data.filters.word_runs import Runs
from raymill.errors import UserError

SLOTS = 128
SEED = 1
PACK = struct.Struct(f"={SLOTS}I").pack
NO_WORDS = 2**32 - 1  # in all slots of a text without words
HASH_BYTES = 16
ROW_BYTES = 2 * (4 * SLOTS + HASH_BYTES + 2)
"""Bytes that `decide` needs for each row: twice its signature, its content hash and the number of its source."""
RUN_BYTES = 3 * 8
"""Bytes for each run of words of a held-out row, also while they are sorted."""
MAX_BYTES = 16 * 2**30
MAX_CANDIDATES = 256  # per band; with more, rows of one form whose similarity is just below the threshold take hours
KEY_ROWS = 2**13  # hashed at once; few, so that their slots stay in the processor's cache
SURE = 0.995  # probability that the bands propose a pair whose similarity is the threshold


class Decisions(NamedTuple):
    """Which rows are near-duplicates, by their content hashes, sorted."""

    dropped: np.ndarray
    """V16."""
    kept: np.ndarray
    """V16: the row that is used instead of each."""
    shared: np.ndarray
    """V16: rows that several sources have."""
    owners: np.ndarray
    """int16: the source that each of these belongs to."""
    crowded: int
    """Rows that were not compared with all that the bands propose, because too many rows resemble each other."""


def signatures(words: Runs, size: int) -> np.ndarray:
    """Return uint32 (texts, SLOTS): the MinHash of each text's runs of `size` words."""
    import rensa  # only needed where near-duplicates are looked for

    make = rensa.RMinHash.digest_matrix_from_flat_token_hashes  # type: ignore[missing-attribute]
    signed = []
    for part in words.slices():
        found = word_runs.runs(part, size)
        matrix = make(found.hashes, found.starts.astype(np.uint64), SLOTS, SEED)
        signed += [PACK(*row) for row in matrix.to_rows()]  # a third of the time of np.array
    return np.frombuffer(b"".join(signed), np.uint32).reshape(-1, SLOTS)


def bands(threshold: float) -> tuple[int, int]:
    """Return how many bands of how many slots propose pairs: the longest bands that miss few pairs at the threshold.

    Bands of r slots propose a pair of similarity s with probability 1 - (1 - s**r)**(SLOTS // r): Leskovec, Rajaraman
    and Ullman, Mining of Massive Datasets, section 3.4.
    """
    for slots in range(SLOTS, 1, -1):
        if 1 - (1 - threshold**slots) ** (SLOTS // slots) >= SURE:
            return SLOTS // slots, slots
    return SLOTS, 1


def decide(hashes: np.ndarray, sources: np.ndarray, signed: np.ndarray, threshold: float) -> Decisions:
    """Return which rows to leave out.

    Args:
        hashes: V16 (rows), the hash of each row's content.
        sources: int16 (rows), the number of the input. Rows with equal content belong to the first.
        signed: uint32 (rows, SLOTS), as from `signatures`.
        threshold: From 0 to 1.
    """
    halves = hashes.view(">u8").reshape(-1, 2)
    order = np.lexsort((sources, halves[:, 1], halves[:, 0]))
    hashes, sources = hashes[order], sources[order]
    is_first = np.ones(len(hashes), bool)
    is_first[1:] = (halves[order[1:]] != halves[order[:-1]]).any(1)
    owners = sources[is_first]
    most = np.maximum.reduceat(sources, np.flatnonzero(is_first)) if len(sources) else sources
    unique, order = hashes[is_first], order[is_first]
    empty = np.flatnonzero(signed[order, 0] == NO_WORDS)
    empty = empty[(signed[order[empty]] == NO_WORDS).all(1)]
    with_words = np.delete(np.arange(len(order)), empty)
    dropped, kept, crowded = _similar(signed[order[with_words]], threshold)
    unique, all_unique = unique[with_words], unique
    is_shared = owners != most
    return Decisions(unique[dropped], unique[kept], all_unique[is_shared], owners[is_shared], crowded)


def check_memory(rows: int, runs: int = 0) -> None:
    """Raise UserError if the signatures of so many rows, or so many runs of held-out words, do not fit."""
    if rows * ROW_BYTES > MAX_BYTES:
        raise UserError(
            f"near_duplicates compares at most {MAX_BYTES // ROW_BYTES:,} rows, because each takes {ROW_BYTES:,} bytes "
            "on one node; pass a part of the input."
        )
    if runs * RUN_BYTES > MAX_BYTES:
        raise UserError(
            f"decontaminate_held_out holds at most {MAX_BYTES // RUN_BYTES:,} runs of words, because each takes "
            f"{RUN_BYTES} bytes on one node; pass a smaller --eval-share."
        )


def _similar(signed: np.ndarray, threshold: float) -> tuple[list[int], list[int], int]:
    """Return the rows that are similar to an earlier row that is kept, the first such rows, and the crowded rows."""
    in_bucket: dict[int, list[int]] = defaultdict(list)  # kept rows
    dropped, instead, crowded = [], [], 0
    for row, buckets in _buckets(signed, *bands(threshold)):
        candidates = sorted({other for bucket in buckets for other in in_bucket[bucket]})
        is_similar = (signed[candidates] == signed[row]).mean(1) >= threshold
        if is_similar.any():
            dropped.append(row)
            instead.append(candidates[int(np.argmax(is_similar))])
            continue
        crowded += any(len(in_bucket[bucket]) == MAX_CANDIDATES for bucket in buckets)
        for bucket in buckets:
            if len(in_bucket[bucket]) < MAX_CANDIDATES:
                in_bucket[bucket].append(row)
    return dropped, instead, crowded


def _buckets(signed: np.ndarray, count: int, slots: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the buckets of each row that shares one with another row, in the order of the rows."""
    rows, numbers, first = [], [], 0
    low = np.uint64((1 << len(signed).bit_length()) - 1)  # these bits hold a row's number, and the others its bucket
    own = np.arange(len(signed), dtype=np.uint64)
    for band in range(count):
        ordered = np.sort(_keys(signed[:, band * slots : (band + 1) * slots]) & ~low | own)
        is_same = (ordered[1:] ^ ordered[:-1]) <= low
        shared = np.flatnonzero(np.append(is_same, False) | np.append(False, is_same))
        rows.append((ordered[shared] & low).astype(np.int64))
        numbers.append(np.cumsum(~np.append(False, is_same)[shared]) + first)
        first += len(shared)
    row, number = np.concatenate(rows), np.concatenate(numbers)
    if not len(row):
        return
    order = np.argsort(row, kind="stable")
    row, number = row[order], number[order]
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    for start, stop in zip(starts, np.append(starts[1:], len(row)), strict=True):
        yield int(row[start]), number[start:stop].tolist()


def _keys(band: np.ndarray) -> np.ndarray:
    """Return a uint64 hash of each row of uint32."""
    keys = np.zeros(len(band), np.uint64)
    for first in range(0, len(band), KEY_ROWS):
        part = slice(first, first + KEY_ROWS)
        for slot in range(band.shape[1]):
            keys[part] = word_runs.combined(keys[part], band[part, slot].astype(np.uint64))
    return keys
