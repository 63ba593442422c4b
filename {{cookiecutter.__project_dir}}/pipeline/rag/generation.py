"""The deployment that answers from sources: it asks the served model, or quotes."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal, NamedTuple

import openai

from pipeline.rag import ranking
from pipeline.rag.index import Found

PROMPT = (
    "Answer from the numbered sources below and from nothing else. After each statement name the source that it is "
    "from, as in [1]. Where they do not hold the answer, say: I do not know.\n\n"
)


NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # for an answer that no model wrote


class End(NamedTuple):
    """How an answer ended. Passed between replicas."""

    finish_reason: str = "stop"
    usage: dict[str, Any] = NO_USAGE


class Failure(NamedTuple):
    """What kept the generator from answering, as it passes between replicas."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: str | None = None


Piece = str | End | Failure


class Generator:
    """Answers from sources: with a served model's words, or with a sentence of theirs."""

    def __init__(self, kind: Literal["model", "quote"], address: str, prompt_characters: int) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="the caller's", max_retries=0)
        self._prompt_characters = prompt_characters
        self._answer = self._ask if kind == "model" else self._quote

    async def generate(
        self, messages: list[dict[str, str]], sources: list[Found], asked: dict[str, Any], key: str
    ) -> AsyncIterator[Piece]:
        """Yield the answer in pieces. The last one is an `End` or a `Failure`."""
        async with contextlib.aclosing(self._answer(messages, sources, asked, key)) as pieces:
            async for piece in pieces:
                yield piece

    async def _quote(
        self, messages: list[dict[str, str]], sources: list[Found], asked: dict[str, Any], _: str
    ) -> AsyncGenerator[Piece]:
        quoted = f"{ranking.quote(messages[-1]['content'], sources[0].text)} [1]"
        yield until(quoted, asked.get("stop", []))
        yield End()

    async def _ask(
        self, messages: list[dict[str, str]], sources: list[Found], asked: dict[str, Any], key: str
    ) -> AsyncGenerator[Piece]:
        """The client's own key is shown to the model, so its limits hold there too."""
        system = {"role": "system", "content": PROMPT + numbered(sources)[: self._prompt_characters]}
        told: list[Any] = [system, *messages]
        completions = self._client.with_options(api_key=key).chat.completions
        end = End()
        try:
            # without a name, whichever model is at the address answers
            async with await completions.create(
                model="", messages=told, stream=True, stream_options={"include_usage": True}, **asked
            ) as stream:
                async for chunk in stream:
                    if chunk.usage:
                        end = end._replace(usage=chunk.usage.model_dump(exclude_none=True))
                    for choice in chunk.choices:
                        if text := choice.delta.content:
                            yield text
                        if choice.finish_reason:
                            end = end._replace(finish_reason=choice.finish_reason)
            yield end
        except openai.APIError as error:
            yield _failure(error)


def _failure(error: openai.APIError) -> Failure:
    if isinstance(error, openai.APIConnectionError | openai.NotFoundError):
        return Failure(503, f"the model that writes the answers does not answer ({error}): inv submit serve_llm")
    if not isinstance(error, openai.APIStatusError):  # in the middle of a stream
        return Failure(503, f"the model that writes the answers failed: {error.message}", code=error.code)
    said = error.body if isinstance(error.body, dict) else {}
    message = str(said.get("message") or error.message)
    return Failure(error.status_code, message, error.param, error.code, error.response.headers.get("retry-after"))


def until(text: str, stops: list[str]) -> str:
    """Return the text before the first stop sequence in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


def numbered(sources: list[Found]) -> str:
    """The sources as a model reads them."""
    return "\n\n".join(f"[{number}] {source.document}: {source.text}" for number, source in enumerate(sources, 1))
