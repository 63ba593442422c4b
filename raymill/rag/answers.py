"""What the deployments of `serve_rag` send each other. Imports little, because the ingress needs it."""

from typing import Any, NamedTuple

NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # for an answer that no model wrote


class ScoredChunk(NamedTuple):
    """A chunk and its relevance to a question."""

    document: str
    text: str
    score: float


class AnswerEnd(NamedTuple):
    """The end of an answer: the reason why it ended, and the number of tokens used."""

    finish_reason: str = "stop"
    usage: dict[str, Any] = NO_USAGE


class Failure(NamedTuple):
    """The error that a client gets instead of an answer, or instead of the rest of an answer."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: str | None = None


AnswerPart = str | AnswerEnd | Failure
"""The generator streams these to the ingress."""


def until(text: str, stops: list[str]) -> str:
    """Return the text up to the first stop sequence."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
