"""Ranks what the retriever found by a plain measure, and quotes from it.

The measure is the mean of two numbers between 0 and 1: the cosine of the vectors, which knows meanings, and the
share of the question's words that a chunk holds, each weighted by how rare it is, which knows names.
"""

import math
import re
from collections import Counter

from pipeline.rag.index import Found

COMMON = set(
    re.findall(r"\w+", "a an and are can do does for how i in is it of on or the to was what when where which who why")
)
"""Words that do not say what a question asks."""


def rank(question: str, found: list[Found]) -> list[Found]:
    """The chunks, the best first, with the plain measure as their score."""
    texts = [_words(f"{chunk.document} {chunk.text}") for chunk in found]
    shares = _shares(_words(question), texts)
    scored = [
        chunk._replace(score=(max(0.0, chunk.score) + share) / 2) for chunk, share in zip(found, shares, strict=True)
    ]
    return sorted(scored, key=lambda chunk: chunk.score, reverse=True)


def quote(question: str, text: str) -> str:
    """The sentence of a text that shares most with the question; of equals the longest, which says most."""
    parts = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text) if part.strip()]
    sentences = [part for part in parts if part[-1] in ".!?"] or parts  # no headings, where there is anything else
    asked = _words(question) - COMMON
    return max(sentences, key=lambda sentence: (len(asked & _words(sentence)), len(sentence)))


def _words(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", text.lower()))


def _shares(question: set[str], texts: list[set[str]]) -> list[float]:
    """For each text, the weight of the question's words that it holds by the weight of all of them."""
    holders = Counter(word for text in texts for word in question & text)
    weight = {word: math.log(1 + len(texts) / (1 + holders[word])) for word in question}
    whole = sum(weight.values()) or 1.0
    return [sum(weight[word] for word in question & text) / whole for text in texts]
