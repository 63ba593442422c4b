"""Measure how often retrieval finds the document that answers a question."""

from typing import TypeVar

import msgspec
import ray

from raymill import settings
from raymill.errors import UserError
from raymill.rag import index, pipeline, ranking
from raymill.training import storage

CANDIDATES = 20  # number of chunks to find for each question
TOP = 5  # a question is a hit if one of the TOP best chunks is from its document


Row = TypeVar("Row", bound=msgspec.Struct)
"""The type of a line of a file with questions."""


class Question(msgspec.Struct):
    """A question, and the id of the document that answers it."""

    question: str
    document: str


def load_questions(file: str, kind: type[Row], section: str) -> list[Row]:
    """Return the questions of a JSONL file, or an empty list if `file` is empty.

    `section` is the section of settings.toml that names the file, for error messages.

    Raises:
        UserError: the file does not exist, or a line is not a question.
    """
    if not file:
        return []
    location = settings.resolve(file)
    text = storage.read_text(location)
    if text is None:
        raise UserError(f"there is no file {location}; set questions in [{section}], or pass --questions.")
    questions = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                questions.append(msgspec.json.decode(line, type=kind))
            except msgspec.DecodeError as error:
                raise UserError(
                    f'{location}, line {number}: {error}; each line must be like {{"question": "…", "document": "…"}}.'
                ) from None
    return questions


def print_hit_rate(questions: list[Question], pool: pipeline.WorkerPool, location: str) -> None:
    """Print the share of questions whose document has one of the TOP best chunks, before and after ranking."""
    texts = [row.question for row in questions]
    vectors = ray.get(pool.actors[0].embed.remote(texts, "query"))
    nearest = index.search_all(location, vectors, CANDIDATES)
    found = index.search_all(location, vectors, CANDIDATES, texts)
    ranked = [ranking.rank(text, chunks) for text, chunks in zip(texts, found, strict=True)]
    for name, results in (("by the vectors alone", nearest), ("by vectors and words, ranked", ranked)):
        hits = [
            is_among(row.document, [chunk.document for chunk in chunks[:TOP]])
            for row, chunks in zip(questions, results, strict=True)
        ]
        print(f"hit rate at {TOP}, {name}: {sum(hits) / len(hits):.0%} of {len(hits)} questions", flush=True)


def is_among(document: str, found: list[str]) -> bool:
    """Return whether a document is among those found. A PDF may be named with its page or without."""
    return document in found or document in [name.partition("#page=")[0] for name in found]
