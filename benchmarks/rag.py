"""Compares ways to find the document that answers a question, on questions about Python's standard library.

rag_questions.jsonl has the questions. Rows with odd numbers tune the ranking; rows with even numbers are only measured.
"""

import asyncio
import json
import sys
import sysconfig
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.report import FOLDER, Result, at_least
from jobs import embed
from jobs.embed import EmbedOptions
from raymill import settings
from raymill.demo import assets
from raymill.rag import index, ranking
from raymill.rag.answers import ScoredChunk
from raymill.rag.embedder import Embedder
from raymill.rag.options import RagOptions

QUESTIONS = FOLDER / "rag_questions.jsonl"
DEFAULT = "vectors and BM25, ranked"  # what `serve_rag` does
HALVES = {"tuning": slice(0, None, 2), "held": slice(1, None, 2)}
KINDS = ("meaning", "name", "typo")


class Question(NamedTuple):
    """A question, and its vector."""

    text: str
    document: str
    """The document that answers it. Empty: no document does."""
    kind: str
    """How it is worded: `meaning` paraphrases, `name` has a name from the document, `typo` is misspelled."""
    vector: np.ndarray


Search = Callable[[Question], Awaitable[list[ScoredChunk]]]


def measure() -> Result:
    """Embed the documentation of the standard library with the project's job, and ask each question in each way."""
    with harness.scratch() as folder:
        documents = assets.documents(_modules())
        harness.write_rows(folder / "library.jsonl", ({"id": name, "text": text} for name, text in documents.items()))
        assets.write_embedder(folder / "model")
        own = {"input": str(folder / "library.jsonl"), "index": str(folder / "index"), "model": str(folder / "model")}
        with harness.one_ray():
            embed.main(settings.load(EmbedOptions, "embed", profile="local").model_copy(update=own | {"questions": ""}))
        questions = _questions(folder / "model", documents)
        answers = asyncio.run(_ask(str(folder / "index"), questions))
    min_score = settings.load(RagOptions, "rag", profile="local").min_score
    rounds: list[dict[str, Any]] = [
        {"way": way, "half": half, **_scores(questions[part], found[part], min_score if "ranked" in way else None)}
        for way, found in answers.items()
        for half, part in HALVES.items()
    ]
    held = {row["way"]: row for row in rounds if row["half"] == "held"}
    default = held[DEFAULT]
    gain = default["MRR@10"] - held["vectors"]["MRR@10"]
    return {
        "bars": [
            at_least(0, "MRR@10 of the default minus that of vectors alone", gain),
            at_least(0.9, "share of unrelated questions that get no source", default["no source if unrelated"]),
            at_least(0.9, "share of found documents that reach min_score", default["found and above min_score"]),
        ],
        "rounds": rounds,
    }


def _modules() -> list[str]:
    """Return the standard library's public modules and packages that are written in Python."""
    library = Path(sysconfig.get_paths()["stdlib"])
    same = {"posixpath", "ntpath", "genericpath"}  # os.path is one of them
    names = [name for name in sys.stdlib_module_names if not name.startswith("_") and name not in same]
    files = {name: (library / f"{name}.py", library / name / "__init__.py") for name in names}
    return ["os.path", *sorted(name for name in names if any(file.is_file() for file in files[name]))]


def _questions(model: Path, documents: dict[str, str]) -> list[Question]:
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    if missing := {row["document"] for row in rows} - documents.keys() - {""}:
        sys.exit(f"error: {QUESTIONS.name} names documents that do not exist: {', '.join(sorted(missing))}. Fix them.")
    vectors = Embedder(str(model), "cpu", "fp32").embed([row["question"] for row in rows], "query")
    return [
        Question(row["question"], row["document"], row["kind"], vector)
        for row, vector in zip(rows, vectors, strict=True)
    ]


async def _ask(location: str, questions: list[Question]) -> dict[str, list[list[ScoredChunk]]]:
    """Return the chunks that each way finds for each question, best first."""
    reader = await index.Reader.open(location)
    count = settings.load(RagOptions, "rag", profile="local").candidates
    database = await index.lancedb.connect_async(location)
    table = await database.open_table(index.TABLE)

    async def vectors(asked: Question) -> list[ScoredChunk]:
        return await reader.search(asked.vector, count)

    async def both(asked: Question) -> list[ScoredChunk]:
        return await reader.search(asked.vector, count, asked.text)

    async def bm25(asked: Question) -> list[ScoredChunk]:
        return _chunks(await table.query().nearest_to_text(asked.text).limit(count).to_list(), "_score")

    async def combined(asked: Question) -> list[ScoredChunk]:
        query = table.query().nearest_to(asked.vector).distance_type("dot").nearest_to_text(asked.text).limit(count)
        rows = await query.rerank(index.lancedb.rerankers.LinearCombinationReranker()).to_list()
        return _chunks(rows, "_relevance_score")

    def ranked(search: Search, weight: float = ranking.COSINE_WEIGHT) -> Search:
        async def rank(asked: Question) -> list[ScoredChunk]:
            return ranking.rank(asked.text, await search(asked), weight)

        return rank

    ways: dict[str, Search] = {
        "vectors": vectors,
        "BM25": bm25,
        "vectors and BM25, LanceDB's reciprocal rank fusion": both,
        "vectors and BM25, LanceDB's linear combination": combined,
        "vectors, ranked with equal weights": ranked(vectors, 0.5),
        "vectors, ranked": ranked(vectors),
        DEFAULT: ranked(both),
    }
    return {way: [await search(asked) for asked in questions] for way, search in ways.items()}


def _chunks(rows: list[dict[str, Any]], score: str) -> list[ScoredChunk]:
    return [ScoredChunk(row["document"], row["text"], row[score]) for row in rows]


def _scores(questions: list[Question], found: list[list[ScoredChunk]], min_score: float | None) -> dict[str, Any]:
    """Return the share of questions whose document comes first, and among the first five, and the mean reciprocal rank.

    With `min_score`, also return how well it separates unrelated questions from the others.
    """
    pairs = list(zip(questions, found, strict=True))
    ranks = {asked.text: _rank(asked.document, chunks) for asked, chunks in pairs if asked.document}
    scores: dict[str, Any] = {
        "hit@1": _share([rank == 1 for rank in ranks.values()]),
        "hit@5": _share([rank <= 5 for rank in ranks.values()]),
        "MRR@10": float(np.mean([1 / rank if rank <= 10 else 0 for rank in ranks.values()])),
        **{
            f"hit@5, {kind}": _share([ranks[asked.text] <= 5 for asked in questions if asked.kind == kind])
            for kind in KINDS
        },
        "no source if unrelated": "",
        "found and above min_score": "",
    }
    if min_score is not None:
        unrelated = [chunks for asked, chunks in pairs if not asked.document]
        hits = [chunks for asked, chunks in pairs if ranks.get(asked.text, 10) <= 5]
        scores["no source if unrelated"] = _share([chunks[0].score < min_score for chunks in unrelated])
        scores["found and above min_score"] = _share([chunks[0].score >= min_score for chunks in hits])
    return scores


def _rank(document: str, chunks: list[ScoredChunk]) -> float:
    """Return the rank of a document among the documents of the chunks, infinity if it is not among them."""
    documents = list(dict.fromkeys(chunk.document for chunk in chunks))
    return documents.index(document) + 1 if document in documents else float("inf")


def _share(values: list[bool]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    harness.main(measure)
