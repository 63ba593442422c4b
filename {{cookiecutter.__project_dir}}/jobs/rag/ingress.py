"""The deployment that takes the requests: it asks retriever, reranker and generator one after the other, and answers
OpenAI's API, behind the same door as a served model."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from jobs.rag.generation import Failure
from jobs.rag.index import Found
from jobs.serving.door import OPEN_ROUTE, Door, Rules
from jobs.serving.keys import Keys

MODEL = "rag"  # by which clients may call it
NOT_KNOWN = "I do not know: nothing in the documents answers that."


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
