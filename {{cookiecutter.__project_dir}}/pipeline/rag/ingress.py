"""The deployment that takes the requests: it asks retriever, reranker and generator one after the other, and answers
OpenAI's API, behind the same door as a served model."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, Field, field_validator, model_validator
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from pipeline.rag.generation import End, Failure, until
from pipeline.rag.index import Found
from pipeline.serving.api_middleware import OPEN_ROUTE, ApiMiddleware, Queued, RequestLimits
from pipeline.serving.keys import Keys

MODEL = "rag"  # by which clients may call it
NOT_KNOWN = "I do not know: nothing in the documents answers that."


class Message(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise ValueError("only parts of type `text` can be read here, each with a text")
        return "\n".join(map(str, texts))


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class TextFormat(BaseModel):
    """OpenAI's `response_format`; only plain text is supported."""

    type: Literal["text"] = "text"


class Asked(BaseModel, extra="forbid"):
    """OpenAI's chat request. Fields that should change the answer but are not supported are rejected."""

    model: str = ""
    messages: list[Message] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # the model is told of these
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str] | None, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = None
    # these have one value
    n: Literal[1] = 1
    logprobs: Literal[False] = False
    response_format: TextFormat = TextFormat()
    # these change no answer
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, asked: Any) -> Any:
        return {name: value for name, value in asked.items() if value is not None} if isinstance(asked, dict) else asked

    @property
    def passed_on(self) -> dict[str, Any]:
        """What the model is told besides the messages."""
        return self.model_dump(include=PASSED_ON, exclude_none=True)


PASSED_ON = {
    *("max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("presence_penalty", "frequency_penalty", "seed", "stop"),
}


class GeneratorError(Exception):
    """The generator could not answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    @property
    def body(self) -> dict[str, Any]:
        """Return the response's body in the shape of OpenAI's errors."""
        kind = "invalid_request_error" if self.failure.status < 500 else "server_error"
        return {
            "error": {
                "message": self.failure.message,
                "type": kind,
                "param": self.failure.param,
                "code": self.failure.code,
            }
        }


class Ingress:
    """The HTTP API."""

    def __init__(
        self,
        parts: tuple[DeploymentHandle, DeploymentHandle, DeploymentHandle],
        rules: RequestLimits,
        sources: int,
        least: float,
    ) -> None:
        self._retriever, self._reranker, generator = parts
        self._generator = generator.options(stream=True)
        self._rules = rules
        self._sources = sources
        self._least = least
        self._keys = Keys()

    async def __serve_build_asgi_app__(self) -> ApiMiddleware:
        app = FastAPI(title="Answers with sources")
        app.add_api_route(OPEN_ROUTE, lambda: {"status": "ok"})
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/v1/models/{model}", self._model)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_exception_handler(RequestValidationError, _explain)
        app.add_exception_handler(GeneratorError, _say_failed)
        self._task = asyncio.create_task(self._keys.keep_up())  # kept: a task that nobody holds may vanish
        return ApiMiddleware(Queued(app, self._rules), self._keys, self._rules)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self._model(MODEL)]}

    async def _model(self, model: str) -> dict[str, Any]:
        if model != MODEL:
            raise HTTPException(404, f"model `{model}` does not exist: use `{MODEL}`")
        return {"id": MODEL, "object": "model", "created": 0, "owned_by": "project"}

    async def _chat(self, asked: Asked, request: Request) -> Response:
        """Answer the last message from the documents; `sources` are beside OpenAI's fields."""
        await self._model(asked.model or MODEL)
        messages = [message.model_dump() for message in asked.messages]
        question = messages[-1]["content"]
        sources = await self._find(question) if question.strip() else []
        key = request.headers["authorization"].partition(" ")[2].strip()
        pieces = self._say(messages, sources, asked.passed_on, key)
        answer = _Answer(sources)
        first = await anext(pieces)  # awaited before the response starts, so that a failure gets an error status
        if asked.stream:
            stream = answer.stream(first, pieces, with_usage=asked.stream_options.include_usage)
            return StreamingResponse(stream, media_type="text/event-stream")
        return JSONResponse(answer.whole([first, *[piece async for piece in pieces]]))

    async def _find(self, question: str) -> list[Found]:
        """The sources that are relevant enough, the best first."""
        found = await self._retriever.find.remote(question)
        if not found:
            return []
        ranked = await self._reranker.rank.remote(question, found)
        return [source for source in ranked[: self._sources] if source.score >= self._least]

    async def _say(
        self, messages: list[dict[str, str]], sources: list[Found], asked: dict[str, Any], key: str
    ) -> AsyncGenerator[str | End]:
        if not sources:
            yield until(NOT_KNOWN, asked.get("stop", []))
            yield End()
            return
        pieces = self._generator.generate.remote(messages, sources, asked, key)
        try:
            async for piece in pieces:
                if isinstance(piece, Failure):
                    raise GeneratorError(piece)
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

    def whole(self, pieces: list[str | End]) -> dict[str, Any]:
        *texts, end = pieces
        assert isinstance(end, End)
        message = {"role": "assistant", "content": "".join(map(str, texts))}
        choice = {"index": 0, "message": message, "finish_reason": end.finish_reason}
        answer = {**self._common, "object": "chat.completion", "choices": [choice], "usage": end.usage}
        return {**answer, "sources": self._sources}

    async def stream(
        self, first: str | End, pieces: AsyncGenerator[str | End], *, with_usage: bool
    ) -> AsyncIterator[str]:
        yield self._delta({"role": "assistant", "content": ""}, sources=self._sources)
        piece = first
        async with contextlib.aclosing(pieces):
            try:
                while not isinstance(piece, End):
                    yield self._delta({"content": piece})
                    piece = await anext(pieces)
            except GeneratorError as error:  # the stream has started, so the status cannot change any more
                yield _event(error.body)
                return
        yield self._delta({}, piece.finish_reason)
        if with_usage:
            yield self._chunk([], usage=piece.usage)
        yield "data: [DONE]\n\n"

    def _delta(self, delta: dict[str, str], finish_reason: str | None = None, **more: Any) -> str:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": finish_reason}], **more)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return _event({**self._common, "object": "chat.completion.chunk", "choices": choices, **more})


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def _explain(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(map(str, first["loc"][1:])) or None
    why = (
        "not supported here, leave it out"
        if first["type"] == "extra_forbidden"
        else first["msg"].removeprefix("Value error, ")
    )
    return JSONResponse({"error": {"message": f"{param or 'the body'}: {why}", "param": param}}, 400)


async def _say_failed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GeneratorError)
    failure = error.failure
    return JSONResponse(error.body, failure.status, {"Retry-After": failure.retry_after} if failure.retry_after else {})
