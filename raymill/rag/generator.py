"""The deployment that answers questions from sources. It asks the served model, or quotes the best source."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal

import openai

from raymill.rag import ranking
from raymill.rag.answers import AnswerEnd, AnswerPart, Failure, ScoredChunk, until
from raymill.serving.errors import MODEL_NOT_FOUND
from raymill.settings import inv

PROMPT = (
    "Answer only from the numbered sources below. After each statement, cite its source, as in [1]. "
    "If the sources do not contain the answer, say: I do not know.\n\n"
)


class Generator:
    """Answers questions from sources. Asks the served model, or quotes a sentence of the best source."""

    def __init__(self, kind: Literal["model", "quote"], address: str, prompt_characters: int) -> None:
        """`address` is the URL of the model, which reads the first `prompt_characters` characters of the sources."""
        self._client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="set for each request", max_retries=0)
        self._prompt_characters = prompt_characters
        self._answer = self._ask if kind == "model" else self._quote

    async def generate(
        self, messages: list[dict[str, str]], sources: list[ScoredChunk], options: dict[str, Any], key: str
    ) -> AsyncIterator[AnswerPart]:
        """Yield the answer in parts. The last part is an `AnswerEnd` or a `Failure`.

        `options` are fields of OpenAI's chat request; `key` is the client's API key.
        """
        async with contextlib.aclosing(self._answer(messages, sources, options, key)) as parts:
            async for part in parts:
                yield part

    async def _quote(
        self, messages: list[dict[str, str]], sources: list[ScoredChunk], options: dict[str, Any], _: str
    ) -> AsyncGenerator[AnswerPart]:
        quoted = f"{ranking.quote(messages[-1]['content'], sources[0].text)} [1]"
        yield until(quoted, options.get("stop", []))
        yield AnswerEnd()

    async def _ask(
        self, messages: list[dict[str, str]], sources: list[ScoredChunk], options: dict[str, Any], key: str
    ) -> AsyncGenerator[AnswerPart]:
        """Ask the model with the client's own key, so that the key's limits apply."""
        system = {"role": "system", "content": PROMPT + numbered(sources)[: self._prompt_characters]}
        prompt: list[Any] = [system, *messages]
        completions = self._client.with_options(api_key=key).chat.completions
        end = AnswerEnd()
        try:
            # without a name, the main model answers
            async with await completions.create(
                model="", messages=prompt, stream=True, stream_options={"include_usage": True}, **options
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
    if isinstance(error, openai.NotFoundError) and error.code == MODEL_NOT_FOUND:
        message = (
            "this key may not use the model that writes the answers; "
            f"the owner can add a key for both: {inv('keys add NAME --models rag,MODEL')}"
        )
        return Failure(404, message, code=MODEL_NOT_FOUND)
    if isinstance(error, openai.APIConnectionError | openai.NotFoundError):
        return Failure(503, f"cannot reach the model that writes the answers ({error}); run {inv('submit serve_llm')}")
    if not isinstance(error, openai.APIStatusError):  # an error event in the stream
        return Failure(503, f"the model that writes the answers failed: {error.message}", code=error.code)
    body = error.body if isinstance(error.body, dict) else {}
    message = str(body.get("message") or error.message)
    return Failure(error.status_code, message, error.param, error.code, error.response.headers.get("retry-after"))


def numbered(sources: list[ScoredChunk]) -> str:
    """Format the sources for the prompt."""
    return "\n\n".join(f"[{number}] {source.document}: {source.text}" for number, source in enumerate(sources, 1))
