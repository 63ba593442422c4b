"""Ranks what the retriever found: by a cross-encoder, or where none is named by a plain measure.

The plain measure is the mean of two numbers between 0 and 1: the cosine of the vectors, which knows meanings, and the
share of the question's words that a chunk holds, each weighted by how rare it is, which knows names.
"""

import math
import re
from collections import Counter

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from jobs import weights
from jobs.rag.index import Found

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


class CrossEncoder:
    """A model that reads question and chunk together; slower than vectors, and better."""

    def __init__(self, model: str, device: str) -> None:
        """`model` is what `weights.find` gives."""
        logging.disable_progress_bar()
        folder = weights.on_this_node(model)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForSequenceClassification.from_pretrained(folder).to(device).eval()
        self._longest = min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings)

    @torch.inference_mode()
    def rank(self, question: str, found: list[Found]) -> list[Found]:
        """The chunks, the best first; their score is the model's, between 0 and 1."""
        pairs = [(question, chunk.text) for chunk in found]
        batch = self._tokenizer(pairs, padding=True, truncation=True, max_length=self._longest, return_tensors="pt")
        scores = self._model(**batch.to(self._model.device)).logits[:, 0].float().sigmoid().tolist()
        scored = [chunk._replace(score=score) for chunk, score in zip(found, scores, strict=True)]
        return sorted(scored, key=lambda chunk: chunk.score, reverse=True)
