"""Asks the API of `serve_rag` questions, and scores the answers."""

import asyncio
import json
import os
import re
import statistics
import string
from collections import Counter
from typing import Any

import msgspec
import openai
from rich.console import Console
from rich.table import Table

from raymill.errors import UserError
from raymill.rag import hit_rate
from raymill.rag.ingress import MODEL
from raymill.settings import inv
from raymill.training import storage

MAX_RETRIES = 8  # the client waits longer before each retry, so key limits and busy replicas do not end the job
CITATION = re.compile(r"\[(\d+(?:, ?\d+)*)\]")
MEASURES = {
    "source_found": "the sources include the document",
    "unknown": 'the answer is "I do not know"',
    "cited": "of the other answers: all citations refer to a source, and there is at least one",
    "contains": "the answer contains the expected one",
    "f1": "mean F1 of the words of the answer and the expected one",
}


class Question(msgspec.Struct):
    """A question. With the id of the document that answers it, or the expected answer, more can be measured."""

    question: str
    document: str = ""
    answer: str = ""


class Answer(msgspec.Struct, omit_defaults=True):
    """A question, what the API answered, and the scores, as MEASURES describes them. None: does not apply."""

    question: str
    answer: str
    sources: list[dict[str, Any]]
    source_found: bool | None = None
    unknown: bool | None = None
    cited: bool | None = None
    contains: bool | None = None
    f1: float | None = None


async def ask_all(url: str, questions: list[Question], at_once: int) -> list[Answer]:
    """Ask the API at `url` all questions, `at_once` at the same time. Return the answers in the same order.

    Raises:
        UserError: the API gives an error.
    """
    slots = asyncio.Semaphore(at_once)
    key = os.environ["SERVE_API_KEY"]
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=MAX_RETRIES) as client:

        async def ask(asked: Question) -> Answer:
            async with slots:
                messages: Any = [{"role": "user", "content": asked.question}]
                response = await client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
            return score(asked, response.choices[0].message.content or "", (response.model_extra or {})["sources"])

        try:
            return await asyncio.gather(*map(ask, questions))
        except openai.APIError as error:
            raise UserError(
                f"serve_rag failed ({error.message}). To see whether it is healthy, run: {inv('status')}"
            ) from None


def score(asked: Question, answer: str, sources: list[dict[str, Any]]) -> Answer:
    """Return the answer with its scores."""
    unknown = not sources or "i do not know" in answer.lower()
    scored = Answer(asked.question, answer, sources, unknown=unknown)
    if asked.document:
        scored.source_found = hit_rate.is_among(asked.document, [source["document"] for source in sources])
    if not unknown:
        cited = [int(number) for numbers in CITATION.findall(answer) for number in numbers.split(",")]
        scored.cited = bool(cited) and all(1 <= number <= len(sources) for number in cited)
    if asked.answer:
        given, expected = words(CITATION.sub("", answer)), words(asked.answer)
        scored.contains = f" {' '.join(expected)} " in f" {' '.join(given)} "
        scored.f1 = f1(given, expected)
    return scored


def words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles.

    This is the normalization of SQuAD's evaluation script: https://rajpurkar.github.io/SQuAD-explorer
    """
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def f1(given: list[str], expected: list[str]) -> float:
    """Return the harmonic mean of precision and recall of the words, as SQuAD does: https://arxiv.org/abs/1606.05250"""
    common = (Counter(given) & Counter(expected)).total()
    return 2 * common / (len(given) + len(expected)) if common else 0.0


def save(answers: list[Answer], output: str) -> None:
    """Write one JSON line per answer."""
    storage.write_text(output, "".join(f"{json.dumps(msgspec.to_builtins(answer))}\n" for answer in answers))


def print_table(answers: list[Answer]) -> None:
    """Print the mean of each measure, and the number of answers that it applies to."""
    table = Table(box=None)
    table.add_column("measure", overflow="fold")
    for column in ("mean", "answers"):
        table.add_column(column, justify="right")
    for name, meaning in MEASURES.items():
        values = [value for answer in answers if (value := getattr(answer, name)) is not None]
        if values:
            mean = statistics.mean(map(float, values))
            table.add_row(meaning, f"{mean:.2f}" if name == "f1" else f"{mean:.0%}", f"{len(values):,}")
    Console(highlight=False, width=120).print(table)  # the log of a submitted job has no terminal width
