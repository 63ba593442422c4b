"""A server of OpenAI's API without a model, behind the door and the page of a real one."""

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
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.serving.api_middleware import ApiMiddleware, RequestLimits
from pipeline.serving.keys import Keys
from pipeline.serving.page import Page

KEY = "for-whoever-tries-it"
MODELS = ("small", "large")


class PretendApi:
    """It answers in the words of `pieces`, and remembers what it was asked."""

    def __init__(self) -> None:
        self.pieces: list[str] = ["All ", "is ", "well."]
        self.pause_s = 0.0
        self.go_on = threading.Event()
        """What it waits for after the first piece."""
        self.go_on.set()
        self.gone: set[str] = set()
        """Models that it names, and no longer has."""
        self.refuse_every = 0
        """Every third request, say, is refused; 0: none."""
        self.refusal = 503
        self.asked: list[dict[str, Any]] = []
        self.sent = 0
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.root = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.url = f"{self.root}/v1"
        routes = [Route("/v1/models", self._models), Route("/v1/chat/completions", self._answer, methods=["POST"])]
        rules = RequestLimits(per_minute=10**6, at_once=100, max_body=10**6, timeout_s=60)
        app = Page(ApiMiddleware(Starlette(routes=routes), Keys(), rules))
        port = int(self.root.rpartition(":")[2])
        self.server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1))

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]})

    async def _answer(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        if asked["model"] in self.gone:
            return JSONResponse({"error": {"message": f"the model {asked['model']} does not exist"}}, 404)
        if self.refuse_every and len(self.asked) % self.refuse_every == 0:
            return JSONResponse({"error": {"message": "busy"}}, self.refusal)
        if "too long" in asked["messages"][-1]["content"]:
            return JSONResponse({"error": {"message": "at most 256 tokens"}}, 400)
        return StreamingResponse(self._stream(asked["model"]), media_type="text/event-stream")

    async def _stream(self, model: str) -> AsyncIterator[str]:
        for number, piece in enumerate(self.pieces):
            if number and not self.go_on.is_set():
                await asyncio.to_thread(self.go_on.wait, 30)
            if number:
                await asyncio.sleep(self.pause_s)
            self.sent += 1
            yield _event(model, {"content": piece})
        yield "data: [DONE]\n\n"


def _event(model: str, delta: dict[str, str]) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[PretendApi]:
    """A running one, whose key is in a file in `folder` and, for clients, in the environment."""
    with pytest.MonkeyPatch.context() as environment:
        (folder / ".env").write_text(f"SERVE_API_KEY={KEY}\n")
        environment.setenv("SECRETS_FILE", str(folder / ".env"))
        environment.setenv("SERVE_API_KEY", KEY)
        environment.delenv("SECRETS_PREFIX", raising=False)
        api = PretendApi()
        thread = threading.Thread(target=api.server.run, daemon=True)
        thread.start()
        wait_until(lambda: api.server.started)
        yield api
        api.go_on.set()
        api.server.should_exit = True
        thread.join()


def wait_until(so: Callable[[], bool], timeout_s: float = 10) -> None:
    """Return once it is so."""
    deadline = time.monotonic() + timeout_s
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
