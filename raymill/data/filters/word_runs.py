"""Hashes of the words of many texts, and of their runs of words, without a Python object for each word.

The hash of a run a[i], …, a[j - 1] is a polynomial in BASE modulo 2**64, taken from sums over a beginning of the array:
(S[j] - S[i]) * BASE**-i with S[i] = sum of a[k] * BASE**k for k < i. So a run of any length takes the same time.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

SEPARATOR, LETTER, CHARACTER, CONTINUATION = range(4)
BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse
TEXT_BYTES = 2**16  # texts hashed at once; few, so that the arrays stay in the processor's cache
SLICE_TEXTS = 256


class Runs(NamedTuple):
    """Hashes of all texts in one array."""

    hashes: np.ndarray
    """uint64."""
    starts: np.ndarray
    """int64, one more than texts: the hashes of text i are hashes[starts[i] : starts[i + 1]]."""

    def joined(self, bounds: np.ndarray) -> "Runs":
        """Return the hashes of groups of texts: group i has the texts from bounds[i] to bounds[i + 1] - 1."""
        return Runs(self.hashes, self.starts[bounds])

    def slices(self) -> Iterator["Runs"]:
        """Yield few texts at a time, so that what is made of them stays in the processor's cache."""
        for first in range(0, len(self.starts) - 1, SLICE_TEXTS):
            starts = self.starts[first : first + SLICE_TEXTS + 1]
            yield Runs(self.hashes[starts[0] : starts[-1]], starts - starts[0])


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


def words_of(examples: list[list[str]]) -> tuple[Runs, np.ndarray]:
    """Return the words of all texts of examples, and the bounds of each example's texts for `Runs.joined`."""
    return words([text for one in examples for text in one]), np.cumsum([0, *map(len, examples)])


def runs(found: Runs, size: int) -> Runs:
    """Return a hash of each run of `size` words in each text. A text with fewer words is one run, if it has any."""
    counts = np.diff(found.starts)
    sizes = np.minimum(counts, size)
    lengths = np.where(counts > 0, counts - sizes + 1, 0)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    first = np.arange(starts[-1]) + np.repeat(found.starts[:-1] - starts[:-1], lengths)
    return Runs(_hashes(found.hashes, first, first + np.repeat(sizes, lengths)), starts)


def combined(hashes: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Return uint64 hashes of pairs, which depend on the order within a pair."""
    hashes = (hashes ^ more) * np.uint64(BASE)
    return hashes ^ (hashes >> np.uint64(29))


def _words(texts: list[bytes]) -> Runs:
    text = b"\0".join([*texts, b""])
    if not text:
        return Runs(np.zeros(0, np.uint64), np.zeros(len(texts) + 1, np.int64))
    kinds = own = np.frombuffer(text.translate(KINDS), np.uint8)
    if not text.isascii():
        leads = np.flatnonzero(own != CONTINUATION)
        kinds = np.repeat(own[leads], np.diff(leads, append=len(own)))
    begins = (kinds[1:] != kinds[:-1]) | (own[1:] == CHARACTER)
    starts = np.concatenate([[0], np.flatnonzero(begins) + 1])
    is_word = kinds[starts] != SEPARATOR
    stops = np.append(starts[1:], len(text))[is_word]
    hashes = _hashes(np.frombuffer(text, np.uint8) + np.uint64(1), starts[is_word], stops)
    text_stops = np.cumsum([len(one) + 1 for one in texts])
    return Runs(hashes, np.concatenate([[0], np.searchsorted(starts[is_word], text_stops)]))


def _hashes(values: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return a hash of each run values[first[i] : stop[i]] of uint64 values."""
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * _powers(BASE, len(values)), out=sums[1:])
    return _mixed((sums[stop] - sums[first]) * _powers(pow(BASE, -1, 2**64), len(values))[first])


def _powers(base: int, count: int) -> np.ndarray:
    """Return the first powers of a number modulo 2**64. Only those for usual texts stay in memory."""
    return _usual_powers(base)[:count] if count <= 2 * TEXT_BYTES else _all_powers(base, count)


@cache
def _usual_powers(base: int) -> np.ndarray:
    return _all_powers(base, 2 * TEXT_BYTES)


def _all_powers(base: int, count: int) -> np.ndarray:
    return np.cumprod(np.concatenate([np.ones(1, np.uint64), np.full(count - 1, base, np.uint64)]))


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


def _kinds() -> bytes:
    """Return what each byte of UTF-8 does."""
    kinds = np.full(256, LETTER, np.uint8)
    kinds[:128] = [LETTER if chr(byte).isalnum() else SEPARATOR for byte in range(128)]
    kinds[0x80:0xC0] = CONTINUATION
    kinds[0xC2] = kinds[0xE2] = SEPARATOR  # U+0080 to U+00BF, and U+2000 to U+2FFF with the general punctuation
    kinds[0xE3:0xEA] = kinds[0xEF] = CHARACTER  # U+3000 to U+9FFF, and their wide forms
    kinds[0xF0:] = SEPARATOR  # emoji
    return kinds.tobytes()


KINDS = _kinds()
