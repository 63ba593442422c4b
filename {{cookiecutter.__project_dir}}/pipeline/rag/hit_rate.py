"""Measure how often retrieval finds the document that answers a question."""

import json
from typing import Any

import ray

import settings
from pipeline.rag import index, pipeline, ranking
from pipeline.training import storage
from settings import UserError

CANDIDATES = 20  # number of chunks to find for each question
TOP = 5  # a question is a hit if one of this many best chunks is from its document


def load_questions(file: str) -> list[dict[str, Any]]:
    """Return rows with `question` and `document`, or an empty list if `file` is empty.

    Raises:
        UserError: the file does not exist.
    """
    if not file:
        return []
    text = storage.read_text(settings.resolve(file))
    if text is None:
        raise UserError(
            f'there is no file {settings.resolve(file)}; set questions in [embed] to an existing file, or to "".'
        )
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def print_hit_rate(questions: list[dict[str, Any]], pool: pipeline.WorkerPool, location: str) -> None:
    """Print the share of questions whose document has one of the best chunks, before and after ranking."""
    texts = [row["question"] for row in questions]
    vectors = ray.get(pool.actors[0].embed.remote(texts, "query"))
    found = index.search_all(location, vectors, CANDIDATES)
    ranked = [ranking.rank(text, chunks) for text, chunks in zip(texts, found, strict=True)]
    for name, results in (("by the vectors alone", found), ("ranked", ranked)):
        hits = [
            row["document"] in [chunk.document for chunk in chunks[:TOP]]
            for row, chunks in zip(questions, results, strict=True)
        ]
        print(f"hit rate at {TOP}, {name}: {sum(hits) / len(hits):.0%} of {len(hits)} questions", flush=True)
