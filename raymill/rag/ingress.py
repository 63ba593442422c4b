"""The deployment that serves the HTTP API. It calls the retriever, the reranker and the generator in turn.

The ingress speaks OpenAI's API, behind the same middleware as a served model, and has the same web page.
"""

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
from starlette.responses import JSONResponse, Response, StreamingResponse

from raymill.rag.answers import AnswerEnd, Failure, ScoredChunk, until
from raymill.ray_support.private import http
from raymill.ray_support.private import serve as private_serve
from raymill.serving import accounting, validation
from raymill.serving.accounting import AccessLog
from raymill.serving.api_middleware import HEALTH_ROUTE, ApiMiddleware
from raymill.serving.errors import ApiError
from raymill.serving.keys import ApiKeys
from raymill.serving.model_router import MAX_NAME_SHOWN
from raymill.serving.page import ChatPage
from raymill.serving.rate_limits import RequestLimits
from raymill.serving.request_queue import QueueMiddleware

MODEL = "rag"  # the model's name in the API
NO_ANSWER = "I do not know: nothing in the documents answers that."


class Message(BaseModel):
    """A message of a conversation."""

    role: Literal["developer", "system", "user", "assistant"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise ValueError("only content parts of type `text` are supported, each with a `text`")
        return "\n".join(map(str, texts))


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class TextFormat(BaseModel):
    """OpenAI's `response_format`; only plain text is supported."""

    type: Literal["text"] = "text"


class ChatRequest(BaseModel, extra="forbid"):
    """OpenAI's chat request. Fields that would change the answer but are not supported are rejected."""

    model: str = ""
    messages: list[Message] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # passed on to the model
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str] | None, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = None
    # only one value is supported
    n: Literal[1] = 1
    logprobs: Literal[False] = False
    response_format: TextFormat = TextFormat()
    # ignored, because these do not change the answer
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @property
    def passed_on(self) -> dict[str, Any]:
        """The fields that are passed on to the model."""
        return self.model_dump(include=PASSED_ON, exclude_none=True)


PASSED_ON = {
    *("max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("presence_penalty", "frequency_penalty", "seed", "stop"),
}


class Ingress:
    """The HTTP API."""

    def __init__(
        self,
        handles: tuple[DeploymentHandle, DeploymentHandle, DeploymentHandle],
        limits: RequestLimits,
        max_sources: int,
        min_score: float,
    ) -> None:
        """`handles` are the handles of the retriever, the reranker and the generator."""
        self._retriever, self._reranker, generator = handles
        self._generator = generator.options(stream=True)
        self._limits = limits
        self._max_sources = max_sources
        self._min_score = min_score
        self._keys = ApiKeys()

    async def __serve_build_asgi_app__(self) -> ChatPage:
        http.support_http_1_0()
        app = FastAPI(title="Answers with sources")
        app.add_api_route(HEALTH_ROUTE, lambda: {"status": "ok"})
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/v1/models/{model}", self._model)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_exception_handler(RequestValidationError, _answer_validation_error)
        validation.stop_at_first_errors(app)
        app.add_exception_handler(ApiError, _answer_api_error)
        self._task = asyncio.create_task(self._keys.refresh_forever())  # asyncio itself keeps only a weak reference
        log = AccessLog(private_serve.logs_folder())  # the log of the served model has the tokens
        queue = QueueMiddleware(app, self._limits)
        api = ApiMiddleware(queue, self._keys, self._limits, on_end=log.write, model=MODEL)
        return ChatPage(api)

    async def _models(self) -> dict[str, Any]:
        record = accounting.current.get()
        allowed = record and self._keys.may_use(record.key, MODEL)
        return {"object": "list", "data": [await self._model(MODEL)] if allowed else []}

    async def _model(self, model: str) -> dict[str, Any]:
        if model != MODEL:
            raise ApiError(404, f"model `{model[:MAX_NAME_SHOWN]}` does not exist: use `{MODEL}`", param="model")
        return {"id": MODEL, "object": "model", "created": 0, "owned_by": "project"}

    async def _chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer the last message from the documents, with `sources` in addition to OpenAI's fields."""
        await self._model(body.model or MODEL)
        messages = [message.model_dump() for message in body.messages]
        question = messages[-1]["content"]
        sources = await self._find_sources(question) if question.strip() else []
        key = request.headers["authorization"].partition(" ")[2].strip()
        parts = self._generate(messages, sources, body.passed_on, key)
        answer = ChatResponse(sources)
        first = await anext(parts)  # awaited before the response starts, so that a failure gets an error status
        if body.stream:
            stream = answer.stream(first, parts, with_usage=body.stream_options.include_usage)
            return StreamingResponse(stream, media_type="text/event-stream")
        return JSONResponse(answer.complete([first, *[part async for part in parts]]))

    async def _find_sources(self, question: str) -> list[ScoredChunk]:
        """Return at most `max_sources` sources with a score of at least `min_score`, best first."""
        found = await self._retriever.find.remote(question)
        if not found:
            return []
        ranked = await self._reranker.rank.remote(question, found)
        return [source for source in ranked[: self._max_sources] if source.score >= self._min_score]

    async def _generate(
        self, messages: list[dict[str, str]], sources: list[ScoredChunk], options: dict[str, Any], key: str
    ) -> AsyncGenerator[str | AnswerEnd]:
        """Yield the answer in parts.

        Raises:
            ApiError: the generator failed.
        """
        if not sources:
            yield until(NO_ANSWER, options.get("stop", []))
            yield AnswerEnd()
            return
        parts = self._generator.generate.remote(messages, sources, options, key)
        try:
            async for part in parts:
                if isinstance(part, Failure):
                    headers = {"Retry-After": part.retry_after} if part.retry_after else {}
                    raise ApiError(part.status, part.message, param=part.param, code=part.code, headers=headers)
                yield part
        finally:
            parts.cancel()  # if the client has disconnected, the model can stop


class ChatResponse:
    """An answer with its sources in OpenAI's format: https://platform.openai.com/docs/api-reference/chat"""

    def __init__(self, sources: list[ScoredChunk]) -> None:
        self._common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": MODEL}
        self._sources = [
            {"number": number, "document": source.document, "score": round(source.score, 4), "text": source.text}
            for number, source in enumerate(sources, 1)
        ]

    def complete(self, parts: list[str | AnswerEnd]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        *texts, end = parts
        assert isinstance(end, AnswerEnd)
        message = {"role": "assistant", "content": "".join(map(str, texts))}
        choice = {"index": 0, "message": message, "finish_reason": end.finish_reason}
        answer = {**self._common, "object": "chat.completion", "choices": [choice], "usage": end.usage}
        return {**answer, "sources": self._sources}

    async def stream(
        self, first: str | AnswerEnd, parts: AsyncGenerator[str | AnswerEnd], *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Yield the events of a streamed response."""
        yield self._delta({"role": "assistant", "content": ""}, sources=self._sources)
        part = first
        async with contextlib.aclosing(parts):
            try:
                while not isinstance(part, AnswerEnd):
                    yield self._delta({"content": part})
                    part = await anext(parts)
            except ApiError as error:  # the stream has started, so the status can no longer change
                yield _event(error.body)
                return
        yield self._delta({}, part.finish_reason)
        if with_usage:
            yield self._chunk([], usage=part.usage)
        yield "data: [DONE]\n\n"

    def _delta(self, delta: dict[str, str], finish_reason: str | None = None, **more: Any) -> str:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": finish_reason}], **more)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return _event({**self._common, "object": "chat.completion.chunk", "choices": choices, **more})


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def _answer_validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return JSONResponse(validation.first_error(error).body, 400)


async def _answer_api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)
