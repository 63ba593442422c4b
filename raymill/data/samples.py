"""Documents of a data set for people to look at: random ones, the shortest and the longest."""

from collections.abc import Iterable, Sequence
from heapq import nlargest, nsmallest
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from raymill.data.packed_folder import PackedFolder
from raymill.data.tokenization import NOT_TRAINED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "samples/documents.json"
RANDOM, EXTREME = 200, 3  # documents of each kind
SHOWN_TOKENS = 1000  # of one document


class Piece(NamedTuple):
    """A part of a document."""

    text: str
    is_trained: bool


class Sample(BaseModel):
    """The beginning of a document."""

    source: int
    """Number of the input."""
    tokens: int
    """Of the whole document."""
    trained_tokens: int
    pieces: list[Piece]


class Samples(BaseModel):
    """Some documents of a data set or a partition."""

    random: list[Sample] = []
    shortest: list[Sample] = []
    longest: list[Sample] = []


def take(
    documents: pa.Table, sources: np.ndarray, tokenizer: "PreTrainedTokenizerBase", partitions: int = 1
) -> Samples:
    """Return documents of one of so many partitions. All are good, and `sources` has the number of each one's input."""
    lengths = pc.list_value_length(documents["input_ids"]).to_numpy()
    order = np.argsort(lengths, kind="stable").tolist()
    chosen = (range(min(len(order), -(-RANDOM // partitions))), order[:EXTREME], order[: -EXTREME - 1 : -1])
    made = [[_sample(documents, int(sources[row]), row, tokenizer) for row in rows] for rows in chosen]
    return Samples(random=made[0], shortest=made[1], longest=made[2])


def pieces(input_ids: Sequence[int], labels: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> list[Piece]:
    """Return the text of a document, split where training begins and ends."""
    runs = groupby(zip(input_ids, labels, strict=True), key=lambda pair: pair[1] != NOT_TRAINED)
    return [Piece(tokenizer.decode([token for token, _ in run]), is_trained) for is_trained, run in runs]


def save(found: Iterable[Samples], output: str) -> None:
    """Write the samples of all partitions to the folder of the data set."""
    parts = list(found)
    chosen = Samples(
        random=[one for part in parts for one in part.random][:RANDOM],
        shortest=nsmallest(EXTREME, (one for part in parts for one in part.shortest), key=lambda one: one.tokens),
        longest=nlargest(EXTREME, (one for part in parts for one in part.longest), key=lambda one: one.tokens),
    )
    PackedFolder(output).save(FILE, chosen.model_dump_json().encode())


def _sample(documents: pa.Table, source: int, row: int, tokenizer: "PreTrainedTokenizerBase") -> Sample:
    input_ids, labels = (documents[name][row].values.to_numpy() for name in ("input_ids", "labels"))
    return Sample(
        source=source,
        tokens=len(input_ids),
        trained_tokens=int((labels != NOT_TRAINED).sum()),
        pieces=pieces(input_ids[:SHOWN_TOKENS].tolist(), labels[:SHOWN_TOKENS].tolist(), tokenizer),
    )
