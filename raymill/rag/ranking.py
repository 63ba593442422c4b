"""Ranks chunks without a model, and quotes the best sentence of a chunk.

The score is the weighted mean of two numbers between 0 and 1: the cosine similarity, which captures meaning, and the
share of the question's words that are in the chunk or its document's id, weighted by rarity, which captures names.
"""

import math
import re
from collections import Counter

from raymill.rag.answers import ScoredChunk

COSINE_WEIGHT = 0.75  # best on the tuning half of the questions of the template's benchmark
STOP_WORDS = set(
    re.findall(r"\w+", "a an and are can do does for how i in is it of on or the to was what when where which who why")
)
"""Words that are ignored when a sentence is compared with a question."""


def rank(question: str, chunks: list[ScoredChunk], cosine_weight: float = COSINE_WEIGHT) -> list[ScoredChunk]:
    """Return the chunks with their new scores, best first."""
    texts = [_words(f"{chunk.document} {chunk.text}") for chunk in chunks]
    shares = _shares(_words(question), texts)
    scored = [
        chunk._replace(score=cosine_weight * max(0.0, chunk.score) + (1 - cosine_weight) * share)
        for chunk, share in zip(chunks, shares, strict=True)
    ]
    return sorted(scored, key=lambda chunk: chunk.score, reverse=True)


def quote(question: str, text: str) -> str:
    """Return the sentence that shares the most words with the question. On a tie, the longest wins."""
    parts = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text) if part.strip()]
    sentences = [part for part in parts if part[-1] in ".!?"] or parts  # skip headings, unless there is nothing else
    question_words = _words(question) - STOP_WORDS
    return max(sentences, key=lambda sentence: (len(question_words & _words(sentence)), len(sentence)))


def _words(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", text.lower()))


def _shares(question: set[str], texts: list[set[str]]) -> list[float]:
    """Return, for each text, the weighted share of the question's words that it contains."""
    texts_with = Counter(word for text in texts for word in question & text)
    weight = {word: math.log(1 + len(texts) / (1 + texts_with[word])) for word in question}
    total = sum(weight.values()) or 1.0
    return [sum(weight[word] for word in question & text) / total for text in texts]
