"""The deployment that answers from sources: it asks the served model, or quotes."""

from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

import openai

from jobs.rag import ranking
from jobs.rag.index import Found

PROMPT = (
    "Answer from the numbered sources below and from nothing else. After each statement name the source that it is "
    "from, as in [1]. Where they do not hold the answer, say: I do not know.\n\n"
)


class Failure(NamedTuple):
    """What kept the generator from answering, as it passes between replicas."""

    status: int
    message: str


class Generator:
    """Answers from sources: with a served model's words, or with a sentence of theirs."""

    def __init__(self, kind: Literal["model", "quote"], address: str, prompt_characters: int) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="the caller's", max_retries=0)
        self._prompt_characters = prompt_characters
        self._answer = self._ask if kind == "model" else self._quote

    async def generate(
        self, messages: list[dict[str, str]], sources: list[Found], asked: dict[str, Any], key: str
    ) -> AsyncIterator[str | Failure]:
        """The answer, piece by piece; a failure is the last of them."""
        async for piece in self._answer(messages, sources, asked, key):
            yield piece

    async def _quote(self, messages: list[dict[str, str]], sources: list[Found], *_: object) -> AsyncIterator[str]:
        yield f"{ranking.quote(messages[-1]['content'], sources[0].text)} [1]"

    async def _ask(
        self, messages: list[dict[str, str]], sources: list[Found], asked: dict[str, Any], key: str
    ) -> AsyncIterator[str | Failure]:
        """The client's own key is shown to the model, so its limits hold there too."""
        system = {"role": "system", "content": PROMPT + numbered(sources)[: self._prompt_characters]}
        told: list[Any] = [system, *messages]
        completions = self._client.with_options(api_key=key).chat.completions
        try:
            # without a name, whichever model is at the address answers
            async with await completions.create(model="", messages=told, stream=True, **asked) as stream:
                async for chunk in stream:
                    if chunk.choices and (text := chunk.choices[0].delta.content):
                        yield text
        except (openai.APIConnectionError, openai.NotFoundError) as error:
            yield Failure(503, f"the model that writes the answers does not answer ({error}): inv submit serve_llm")
        except openai.APIStatusError as error:
            said = error.body.get("message") if isinstance(error.body, dict) else None
            yield Failure(error.status_code, str(said or error.message))


def numbered(sources: list[Found]) -> str:
    """The sources as a model reads them."""
    return "\n\n".join(f"[{number}] {source.document}: {source.text}" for number, source in enumerate(sources, 1))
