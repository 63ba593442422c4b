"""Hashes of the words of many texts, and of their runs of words, without a Python object for each word."""

from typing import NamedTuple

import numpy as np

SEPARATOR, LETTER, CHARACTER, CONTINUATION = range(4)
MIX = np.uint64(0x9E3779B97F4A7C15)
LONG_WORD = 256  # bytes; the order of the bytes behind it does not count
TEXT_BYTES = 2**16  # texts hashed at once; few, so that the arrays stay in the processor's cache


class Runs(NamedTuple):
    """Hashes of all texts in one array."""

    hashes: np.ndarray
    """uint64."""
    starts: np.ndarray
    """int64, one more than texts: the hashes of text i are hashes[starts[i] : starts[i + 1]]."""


def words(texts: list[str]) -> Runs:
    """Return a hash of each word of each text, in lower case.

    A word is a run of letters and digits. In Chinese and Japanese, which have no spaces, each character is a word.
    """
    encoded = [text.lower().encode(errors="replace") for text in texts]  # evaluation sets may have bad rows
    parts, first, size = [], 0, 0
    for number, text in enumerate(encoded, 1):
        size += len(text)
        if size >= TEXT_BYTES or number == len(encoded):
            parts.append(_words(encoded[first:number]))
            first, size = number, 0
    return _concatenate(parts)


def runs(found: Runs, size: int) -> Runs:
    """Return a hash of each run of `size` words in each text. A text with fewer words is one run, if it has any."""
    counts = np.diff(found.starts)
    sizes = np.minimum(counts, size)
    lengths = np.where(counts > 0, counts - sizes + 1, 0)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    at = np.arange(starts[-1]) + np.repeat(found.starts[:-1] - starts[:-1], lengths)
    sizes = np.repeat(sizes, lengths)
    hashes, shortest = sizes.astype(np.uint64), sizes.min(initial=size)
    for offset in range(size):
        inside = slice(None) if offset < shortest else np.flatnonzero(sizes > offset)
        hashes[inside] = combined(hashes[inside], found.hashes[at[inside] + offset])
    return Runs(hashes, starts)


def combined(hashes: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Return uint64 hashes of pairs, which depend on the order within a pair."""
    hashes = (hashes ^ more) * MIX
    return hashes ^ (hashes >> np.uint64(29))


def _words(texts: list[bytes]) -> Runs:
    data = np.frombuffer(b"\0".join([*texts, b""]), np.uint8)
    if not len(data):
        return Runs(np.zeros(0, np.uint64), np.zeros(len(texts) + 1, np.int64))
    own = KINDS[data]
    leads = np.flatnonzero(own != CONTINUATION)
    kinds = np.repeat(own[leads], np.diff(leads, append=len(data)))
    ends_another = np.ones(len(data), bool)
    ends_another[1:] = (kinds[1:] != kinds[:-1]) | (own[1:] == CHARACTER)
    starts = np.flatnonzero(ends_another)
    stops = np.append(starts[1:], len(data))
    is_word = kinds[starts] != SEPARATOR
    offsets = np.arange(len(data)) - np.repeat(starts, stops - starts)
    hashes = np.add.reduceat((data + np.uint64(1)) * WEIGHTS[np.minimum(offsets, LONG_WORD - 1)], starts)[is_word]
    text_stops = np.cumsum([len(text) + 1 for text in texts])
    return Runs(_mixed(hashes), np.concatenate([[0], np.searchsorted(starts[is_word], text_stops)]))


def _concatenate(parts: list[Runs]) -> Runs:
    sizes = np.cumsum([0, *(len(part.hashes) for part in parts)])
    starts = [part.starts[1:] + size for part, size in zip(parts, sizes, strict=False)]
    hashes = np.concatenate([np.zeros(0, np.uint64), *(part.hashes for part in parts)])
    return Runs(hashes, np.concatenate([np.zeros(1, np.int64), *starts]))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return values whose bits all depend on all bits of the given ones: the end of the generator splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _kinds() -> np.ndarray:
    """Return what each byte of UTF-8 does."""
    kinds = np.full(256, LETTER, np.uint8)
    kinds[:128] = [LETTER if chr(byte).isalnum() else SEPARATOR for byte in range(128)]
    kinds[0x80:0xC0] = CONTINUATION
    kinds[0xC2] = kinds[0xE2] = SEPARATOR  # U+0080 to U+00BF, and U+2000 to U+2FFF with the general punctuation
    kinds[0xE3:0xEA] = kinds[0xEF] = CHARACTER  # U+3000 to U+9FFF, and their wide forms
    kinds[0xF0:] = SEPARATOR  # emoji
    return kinds


KINDS = _kinds()
WEIGHTS = _mixed(np.arange(1, LONG_WORD + 1, dtype=np.uint64) * MIX)
