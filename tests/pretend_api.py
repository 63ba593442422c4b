"""A fake of the served API: it has no model, but the real middleware and web page."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from processes import in_background
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raymill.serving.api_middleware import ApiMiddleware
from raymill.serving.keys import ApiKeys
from raymill.serving.page import ChatPage
from raymill.serving.rate_limits import RequestLimits

KEY = "the-key-of-the-fake-api"
MODELS = ("small", "large")


class PretendApi:
    """Answers each request with `chunks`, and records the requests."""

    def __init__(self) -> None:
        self.chunks: list[str] = ["All ", "is ", "well."]
        self.reasoning = ""
        """Each answer starts with this reasoning."""
        self.sources: list[dict[str, Any]] = []
        """If not empty, each answer starts with these sources, as the answers of `serve_rag` do."""
        self.finish_reason = "stop"
        self.delay_s = 0.0
        self.resume = threading.Event()
        """A stream waits for this event after its first chunk."""
        self.resume.set()
        self.deleted: set[str] = set()
        """These models are listed, but requests to them get 404."""
        self.fail_every = 0
        """If not 0, every n-th request fails with `failure_status`."""
        self.failure_status = 503
        self.requests: list[dict[str, Any]] = []
        self.sent = 0
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.root = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.url = f"{self.root}/v1"
        routes = [Route("/v1/models", self._models), Route("/v1/chat/completions", self._answer, methods=["POST"])]
        limits = RequestLimits(per_minute=10**6, at_once=100, max_body=10**6, timeout_s=60)
        app = ChatPage(ApiMiddleware(Starlette(routes=routes), ApiKeys(), limits))
        port = int(self.root.rpartition(":")[2])
        self.server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1))

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if body["model"] in self.deleted:
            return JSONResponse({"error": {"message": f"the model {body['model']} does not exist"}}, 404)
        if self.fail_every and len(self.requests) % self.fail_every == 0:
            return JSONResponse({"error": {"message": "busy"}}, self.failure_status)
        if "too long" in body["messages"][-1]["content"]:
            return JSONResponse({"error": {"message": "at most 256 tokens"}}, 400)
        return StreamingResponse(self._stream(body["model"]), media_type="text/event-stream")

    async def _stream(self, model: str) -> AsyncIterator[str]:
        if self.sources:
            yield _event(model, {"role": "assistant", "content": ""}, sources=self.sources)
        if self.reasoning:
            yield _event(model, {"reasoning": self.reasoning})
        for number, chunk in enumerate(self.chunks):
            if number and not self.resume.is_set():
                await asyncio.to_thread(self.resume.wait, 30)
            if number:
                await asyncio.sleep(self.delay_s)
            self.sent += 1
            yield _event(model, {"content": chunk})
        yield _event(model, {}, self.finish_reason)
        yield "data: [DONE]\n\n"


def _event(model: str, delta: dict[str, str], finish_reason: str | None = None, **more: Any) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}
    return f"data: {json.dumps(chunk | more)}\n\n"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[PretendApi]:
    """Run a fake API. Its key is in a file in `folder` and, for clients, in the environment."""
    with pytest.MonkeyPatch.context() as environment:
        (folder / ".env").write_text(f"SERVE_API_KEY={KEY}\n")
        environment.setenv("SECRETS_FILE", str(folder / ".env"))
        environment.setenv("SERVE_API_KEY", KEY)
        environment.delenv("SECRETS_PREFIX", raising=False)
        api = PretendApi()
        with in_background(api.server):
            yield api
            api.resume.set()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
