"""The Serve application behind `serve_rag`: retriever, reranker and generator, each a deployment that scales by itself,
and an ingress that asks one after the other and answers OpenAI's API, behind the same door as a served model."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import openai
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.deployment import Application
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from jobs import weights
from jobs.rag import ranking
from jobs.rag.embedder import Embedder
from jobs.rag.index import Found, Reader
from jobs.rag.ranking import CrossEncoder
from jobs.serving.door import OPEN_ROUTE, Door, Rules
from jobs.serving.keys import Keys

if TYPE_CHECKING:
    from jobs.serve_rag import RagOptions, Replicas

MODEL = "rag"  # by which clients may call it
NOT_KNOWN = "I do not know: nothing in the documents answers that."
PROMPT = (
    "Answer from the numbered sources below and from nothing else. After each statement name the source that it is "
    "from, as in [1]. Where they do not hold the answer, say: I do not know.\n\n"
)


class Failure(NamedTuple):
    """What kept the generator from answering, as it passes between replicas."""

    status: int
    message: str


class Retriever:
    """Finds the chunks nearest to a question, in the index as it is at that moment."""

    async def __init__(self, location: str, device: str, candidates: int) -> None:
        self._reader = await Reader.open(location)
        model = await asyncio.to_thread(weights.find, self._reader.recipe.model)
        self._embedder = await asyncio.to_thread(Embedder, model, device, "fp32")
        self._candidates = candidates

    async def find(self, question: str) -> list[Found]:
        [vector] = await asyncio.to_thread(self._embedder.embed, [question], "query")
        return await self._reader.search(vector.tolist(), self._candidates)


class Reranker:
    """Puts what was found into order."""

    def __init__(self, model: str, device: str) -> None:
        self._rank = CrossEncoder(weights.find(model), device).rank if model else ranking.rank

    async def rank(self, question: str, found: list[Found]) -> list[Found]:
        return await asyncio.to_thread(self._rank, question, found)


class Generator:
    """Answers from sources: with a served model's words, or with a sentence of theirs."""

    def __init__(self, kind: Literal["model", "quote"], address: str, prompt_characters: int) -> None:
        self._address = address
        self._prompt_characters = prompt_characters
        self.answer = self._ask if kind == "model" else self._quote

    async def generate(
        self, messages: list[dict[str, str]], sources: list[Found], asked: dict[str, Any], key: str
    ) -> AsyncIterator[str | Failure]:
        """The answer, piece by piece; a failure is the last of them."""
        async for piece in self.answer(messages, sources, asked, key):
            yield piece

    async def _quote(self, messages: list[dict[str, str]], sources: list[Found], *_: object) -> AsyncIterator[str]:
        yield f"{ranking.quote(messages[-1]['content'], sources[0].text)} [1]"

    async def _ask(
        self, messages: list[dict[str, str]], sources: list[Found], asked: dict[str, Any], key: str
    ) -> AsyncIterator[str | Failure]:
        """The client's own key is shown to the model, so its limits hold there too."""
        system = {"role": "system", "content": PROMPT + numbered(sources)[: self._prompt_characters]}
        told: list[Any] = [system, *messages]
        client = openai.AsyncOpenAI(base_url=f"{self._address}/v1", api_key=key, max_retries=0)
        try:
            # without a name, whichever model is at the address answers
            stream = await client.chat.completions.create(model="", messages=told, stream=True, **asked)
            async for chunk in stream:
                if chunk.choices and (text := chunk.choices[0].delta.content):
                    yield text
        except openai.APIStatusError as error:
            yield Failure(error.status_code, error.message)
        except openai.APIError as error:
            yield Failure(503, f"the model that writes the answers does not answer ({error}): inv submit serve_llm")


def numbered(sources: list[Found]) -> str:
    """The sources as a model reads them."""
    return "\n\n".join(f"[{number}] {source.document}: {source.text}" for number, source in enumerate(sources, 1))


class Message(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Asked(BaseModel):
    """What of OpenAI's request counts here."""

    messages: list[Message] = Field(min_length=1)
    stream: bool = False
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None

    @property
    def passed_on(self) -> dict[str, Any]:
        """What the model is told besides the messages."""
        return self.model_dump(exclude={"messages", "stream"}, exclude_none=True)


class Ingress:
    """The HTTP API."""

    def __init__(
        self,
        parts: tuple[DeploymentHandle, DeploymentHandle, DeploymentHandle],
        rules: Rules,
        sources: int,
        least: float,
    ) -> None:
        self._retriever, self._reranker, generator = parts
        self._generator = generator.options(stream=True)
        self._rules = rules
        self._sources = sources
        self._least = least
        self._keys = Keys()

    async def __serve_build_asgi_app__(self) -> Door:
        app = FastAPI(title="Answers with sources")
        app.add_api_route(OPEN_ROUTE, lambda: {"status": "ok"})
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_exception_handler(RequestValidationError, _explain)
        self._task = asyncio.create_task(self._keys.keep_up())  # kept: a task that nobody holds may vanish
        return Door(app, self._keys, self._rules)

    async def _models(self) -> dict[str, Any]:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "project"}
        return {"object": "list", "data": [model]}

    async def _chat(self, asked: Asked, request: Request) -> Response:
        """Answer the last message from the documents; `sources` are beside OpenAI's fields."""
        messages = [message.model_dump() for message in asked.messages]
        question = messages[-1]["content"]
        sources = await self._find(question) if question.strip() else []
        key = request.headers["authorization"].removeprefix("Bearer ")
        pieces = self._say(messages, sources, asked.passed_on, key)
        answer = _Answer(sources)
        first = await anext(pieces, "")  # a failure before it is an error, not the start of a stream
        if asked.stream:
            return StreamingResponse(answer.stream(first, pieces), media_type="text/event-stream")
        return JSONResponse(answer.whole(first + "".join([piece async for piece in pieces])))

    async def _find(self, question: str) -> list[Found]:
        """The sources that are relevant enough, the best first."""
        found = await self._retriever.find.remote(question)
        if not found:
            return []
        ranked = await self._reranker.rank.remote(question, found)
        return [source for source in ranked[: self._sources] if source.score >= self._least]

    async def _say(
        self, messages: list[dict[str, str]], sources: list[Found], asked: dict[str, Any], key: str
    ) -> AsyncIterator[str]:
        if not sources:
            yield NOT_KNOWN
            return
        pieces = self._generator.generate.remote(messages, sources, asked, key)
        try:
            async for piece in pieces:
                if isinstance(piece, Failure):
                    raise HTTPException(piece.status, piece.message)
                yield piece
        finally:
            pieces.cancel()  # where the client has hung up, the model need not go on


class _Answer:
    """An answer in OpenAI's shape, https://platform.openai.com/docs/api-reference/chat, with its sources."""

    def __init__(self, sources: list[Found]) -> None:
        self._common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": MODEL}
        self._sources = [
            {"number": number, "document": source.document, "score": round(source.score, 4), "text": source.text}
            for number, source in enumerate(sources, 1)
        ]

    def whole(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {**self._common, "object": "chat.completion", "choices": [choice], "sources": self._sources}

    async def stream(self, first: str, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
        yield self._event({"role": "assistant", "content": first}, sources=self._sources)
        async for piece in pieces:
            yield self._event({"content": piece})
        yield self._event({}, "stop")
        yield "data: [DONE]\n\n"

    def _event(self, delta: dict[str, str], finish_reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        chunk = {**self._common, "object": "chat.completion.chunk", "choices": [choice], **more}
        return f"data: {json.dumps(chunk)}\n\n"


async def _explain(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(map(str, first["loc"][1:]))
    return JSONResponse({"error": {"message": f"{param}: {first['msg']}", "param": param}}, 400)


def build(options: "RagOptions", location: str, address: str, rules: Rules) -> Application:
    """The whole application: answers from the index at `location`, and where a model writes them, from that at the
    address; nothing is started."""
    retriever = _deployment(Retriever, options.retriever).bind(location, options.device, options.candidates)
    reranker = _deployment(Reranker, options.ranker).bind(options.reranker, options.device)
    generator = _deployment(Generator, options.answerer).bind(options.generator, address, options.prompt_characters)
    ingress = _deployment(serve.ingress()(Ingress), options.ingress)
    return ingress.bind((retriever, reranker, generator), rules, options.sources, options.min_score)


def _deployment(of: type, replicas: "Replicas") -> serve.Deployment:
    return serve.deployment(
        of,
        name=of.__name__,
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_ongoing_requests,
        },
        max_ongoing_requests=2 * replicas.target_ongoing_requests,
        max_constructor_retry_count=1,  # what cannot be loaded is not tried again for minutes
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
    )
