"""Find training rows that share runs of words with evaluation sets."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from raymill import settings
from raymill.data import file_formats, row_sources, rows
from raymill.data.examples import BadRow
from raymill.data.filters import word_runs
from raymill.data.filters.word_runs import Runs
from raymill.errors import UserError

MIN_WORDS = 8  # a shorter text is shared by chance
MAX_ROWS = 10  # a run of words in more rows of the evaluation sets is a phrase of their form (GPT-3, appendix C)
SPARSE, MAX_BITS = 16, 24
NONE = np.zeros(0, np.uint64)


def read_questions(names: Iterable[str], size: int) -> np.ndarray:
    """Return the runs of `size` words in all texts of evaluation sets, sorted, without those in many rows.

    Raises:
        UserError: a set cannot be read, or contains no text.
    """
    found, least = [], min(size, MIN_WORDS)
    for name in dict.fromkeys(map(settings.resolve, names)):  # a set named twice would have all its words in two rows
        of_set = [of_parts(list(_texts(row)), size) for row in _rows(name)]
        if not any(map(len, of_set)):
            raise UserError(
                f"{name} has no row with a text of {least} words or more, so no training row can be "
                "compared with it; correct decontaminate in [preprocess.filters]."
            )
        if short := sum(not len(runs) for runs in of_set):
            print(
                f"note: {name}: {short:,} of {len(of_set):,} rows have fewer than {least} words: not compared",
                flush=True,
            )
        found += of_set
    runs = rare(found)
    if found and not len(runs):
        raise UserError(
            f"all words of the evaluation sets are in more than {MAX_ROWS} of their rows, so no training row can be "
            "compared with them; correct decontaminate in [preprocess.filters]."
        )
    return runs


def of_parts(parts: list[str], size: int) -> np.ndarray:
    """Return the runs of `size` words in texts, each once. A shorter text is one run, if it has MIN_WORDS words."""
    words = word_runs.words(parts)
    found = word_runs.runs(words, size)
    long = np.diff(words.starts) >= min(size, MIN_WORDS)
    return np.unique(found.hashes[np.repeat(long, np.diff(found.starts))])


def rare(found: list[np.ndarray]) -> np.ndarray:
    """Return the runs that occur in few of these rows, sorted. Each row has a run at most once."""
    runs, counts = np.unique(np.concatenate([NONE, *found]), return_counts=True)
    return runs[counts <= MAX_ROWS]


class Questions(NamedTuple):
    """Runs of words, in a form in which others can quickly be compared with them."""

    hashes: np.ndarray
    """uint64, sorted."""
    may_be: np.ndarray
    """bool: for each value of the lowest bits, whether a hash has it. Usually, at most one in SPARSE is True."""

    @classmethod
    def of(cls, hashes: np.ndarray) -> "Questions":
        may_be = np.zeros(1 << min(MAX_BITS, (SPARSE * len(hashes)).bit_length()), bool)
        may_be[hashes & np.uint64(len(may_be) - 1)] = True
        return cls(hashes, may_be)

    def contain(self, hashes: np.ndarray) -> np.ndarray:
        """Return whether each hash is one of these."""
        found = self.may_be[hashes & np.uint64(len(self.may_be) - 1)]
        candidates = np.flatnonzero(found)
        place = np.searchsorted(self.hashes, hashes[candidates])
        found[candidates] = self.hashes[np.minimum(place, len(self.hashes) - 1)] == hashes[candidates]
        return found


def contains(questions: Questions, words: Runs, bounds: np.ndarray, size: int) -> np.ndarray:
    """Return whether each example has one of the runs of `size` words in `questions`.

    Args:
        questions: As from `read_questions`.
        words: The words of all texts.
        bounds: int64, one more than examples: example i has the texts from bounds[i] to bounds[i + 1] - 1.
        size: Words in a run.
    """
    of_texts = [np.zeros(0, bool)]
    for part in words.slices():
        found = word_runs.runs(part, size)
        hits = np.concatenate([[0], np.cumsum(questions.contain(found.hashes))])[found.starts]
        of_texts.append(hits[1:] > hits[:-1])
    hits = np.concatenate([[0], np.cumsum(np.concatenate(of_texts))])[bounds]
    return hits[1:] > hits[:-1]


def _rows(name: str) -> Iterator[Any]:
    source = row_sources.find(name, "preprocess.filters")
    for piece in source.pieces:
        for raw in file_formats.read(source.files.filesystem, piece, ()):
            try:
                yield rows.parse(raw)
            except BadRow as bad:
                raise UserError(
                    f"{name} has a bad row ({bad}); correct the file, or decontaminate in [preprocess.filters]."
                ) from None


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a row of any form."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
