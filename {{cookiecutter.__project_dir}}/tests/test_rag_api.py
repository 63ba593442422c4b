"""Test answers with sources through OpenAI's client: a real generator in front of a fake model, without Ray."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.rag.generation import PROMPT, Generator
from pipeline.rag.index import Found
from pipeline.rag.ingress import MODEL, NOT_KNOWN, Ingress
from pipeline.serving.api_middleware import RequestLimits

SOURCES = [Found("a.md", "Apples are red. Pears are green.", 0.9)]
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
QUOTE = "Apples are red. [1]"


class Model:
    """A fake model that records its requests, and fails as the question says."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        self.server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error"))

    async def _answer(self, request: Request) -> Response:
        self.asked = await request.json()
        question = self.asked["messages"][-1]["content"]
        if question.startswith("status "):
            error = {"message": "no more", "type": "server_error", "param": "stop", "code": "some_code"}
            return JSONResponse({"error": error}, int(question.split()[1]), {"Retry-After": "17"})
        return StreamingResponse(self._pieces(question), media_type="text/event-stream")

    async def _pieces(self, question: str) -> AsyncIterator[str]:
        common = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        words = [] if question == "nothing" else ["one ", "two"]
        for text in words:
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            yield f"data: {json.dumps(common | {'choices': [choice]})}\n\n"
        if question == "break":
            yield f"data: {json.dumps({'error': {'message': 'the engine died', 'code': 'engine_dead'}})}\n\n"
            return
        choice = {"index": 0, "delta": {}, "finish_reason": "length"}
        yield f"data: {json.dumps(common | {'choices': [choice]})}\n\n"
        if self.asked.get("stream_options", {}).get("include_usage"):
            yield f"data: {json.dumps(common | {'choices': [], 'usage': USAGE})}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    server = Model()
    thread = threading.Thread(target=server.server.run)
    thread.start()
    while not server.server.started:
        time.sleep(0.01)
    yield server
    server.server.should_exit = True
    thread.join()


@pytest.fixture(autouse=True)
def _with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("SERVE_API_KEY=key\n")
    monkeypatch.setenv("SECRETS_FILE", str(tmp_path / ".env"))
    monkeypatch.delenv("SECRETS_PREFIX", raising=False)


class Pieces:
    """What a deployment's handle returns for a stream."""

    def __init__(self, pieces: AsyncIterator[Any]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._pieces

    def cancel(self) -> None:
        pass


def handles(generator: Generator, sources: list[Found]) -> Any:
    """Retriever, reranker and generator as the ingress calls them, in this process."""

    async def find(question: str) -> list[Found]:
        return sources

    async def rank(question: str, found: list[Found]) -> list[Found]:
        return found

    def generate(*arguments: Any) -> Pieces:
        return Pieces(generator.generate(*arguments))

    stream = SimpleNamespace(generate=SimpleNamespace(remote=generate))
    return (
        SimpleNamespace(find=SimpleNamespace(remote=find)),
        SimpleNamespace(rank=SimpleNamespace(remote=rank)),
        SimpleNamespace(options=lambda **_: stream),
    )


class Client:
    """OpenAI's client for an app in this process."""

    def __init__(self, address: str, *, kind: Any = "model", sources: list[Found] = SOURCES) -> None:
        self._arguments = (kind, address, 10_000)
        self._sources = sources

    def run(self, call: Any) -> Any:
        """Return the result of `call` with a client."""

        async def called() -> Any:
            parts = handles(Generator(*self._arguments), self._sources)
            rules = RequestLimits(per_minute=1000, at_once=10, max_body=100_000, timeout_s=30)
            app = await Ingress(parts, rules, 5, 0).__serve_build_asgi_app__()
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport) as http:
                client = openai.AsyncOpenAI(base_url="http://rag/v1", api_key="key", max_retries=0, http_client=http)
                return await call(client)

        return asyncio.run(called())

    def ask(self, content: Any = "What are apples?", **more: Any) -> Any:
        """Return the answer, or a stream's chunks as a list."""

        async def call(client: openai.AsyncOpenAI) -> Any:
            asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": content}]} | more
            answer = await client.chat.completions.create(**asked)
            return [chunk async for chunk in answer] if more.get("stream") else answer

        return self.run(call)


@pytest.fixture
def client(model: Model) -> Client:
    return Client(f"http://127.0.0.1:{model.port}")


def test_a_whole_answer_ends_as_the_models_did(client: Client) -> None:
    answer = client.ask()
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("one two", "length")
    assert answer.usage.model_dump(exclude_none=True) == USAGE
    assert [source["document"] for source in answer.model_extra["sources"]] == ["a.md"]


def test_a_stream_ends_as_the_models_did(client: Client) -> None:
    first, *rest, last = client.ask(stream=True)
    assert [source["document"] for source in first.model_extra["sources"]] == ["a.md"]
    assert first.choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in rest] == ["one ", "two"]
    assert last.choices[0].finish_reason == "length"
    *chunks, usage = client.ask(stream=True, stream_options={"include_usage": True})
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage.model_dump(exclude_none=True)) == ([], USAGE)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_no_words_is_an_answer(client: Client, stream: bool) -> None:
    answer = client.ask("nothing", stream=stream)
    assert (answer[-1] if stream else answer).choices[0].finish_reason == "length"


@pytest.mark.parametrize(("kind", "sources", "text"), [("quote", SOURCES, QUOTE), ("model", [], NOT_KNOWN)])
def test_what_no_model_wrote_took_no_tokens_and_stops(kind: str, sources: list[Found], text: str) -> None:
    client = Client("http://127.0.0.1:9", kind=kind, sources=sources)
    answer = client.ask()
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
    assert answer.usage.total_tokens == 0
    assert client.ask(stream=True, stream_options={"include_usage": True})[-1].usage.total_tokens == 0
    assert client.ask(stop=[text[5:8], "absent"]).choices[0].message.content == text[: text.index(text[5:8])]


def test_text_in_parts_is_text(client: Client, model: Model) -> None:
    client.ask([{"type": "text", "text": "What are"}, {"type": "text", "text": "apples?"}])
    assert model.asked["messages"][-1]["content"] == "What are\napples?"


def test_what_the_model_takes_reaches_it(client: Client, model: Model) -> None:
    told = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.5, "seed": -3, "stop": "x"}
    told |= {"presence_penalty": -1, "frequency_penalty": 1}
    client.ask(**told, n=1, user="someone", response_format={"type": "text"}, extra_body={"logit_bias": None})
    asked = dict(model.asked)
    assert asked.pop("messages")[0]["content"].startswith(PROMPT)
    expected = told | {"stop": ["x"], "model": "", "stream": True, "stream_options": {"include_usage": True}}
    assert asked == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": 3}, "stop"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"top_k": 3}}, "top_k"),
    ],
)
def test_what_cannot_be_honoured_is_refused(client: Client, more: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.ask(**more, stream=stream)
    assert caught.value.param == param
    assert "Value error" not in str(caught.value)


def test_a_question_that_is_no_text_is_refused(client: Client) -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": "half \ud83d"}]}).encode()
    with pytest.raises(openai.BadRequestError) as caught:
        client.run(lambda asking: asking.post("/chat/completions", content=raw, cast_to=object))
    assert caught.value.param == "messages.0.content"


def test_the_model_can_be_retrieved_and_no_other_asked(client: Client) -> None:
    assert client.run(lambda asking: asking.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError, match="use `rag`"):
        client.run(lambda asking: asking.models.retrieve("other"))
    with pytest.raises(openai.NotFoundError, match="use `rag`"):
        client.ask(model="other")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 429, 503])
def test_an_error_of_the_models_is_the_clients(client: Client, status: int, stream: bool) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.ask(f"status {status}", stream=stream)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (status, "some_code", "stop")
    assert caught.value.response.headers["retry-after"] == "17"
    assert caught.value.response.json()["error"]["message"] == "no more"


def test_where_no_model_answers_the_next_command_is_named() -> None:
    with pytest.raises(openai.InternalServerError, match="inv submit serve_llm"):
        Client("http://127.0.0.1:9").ask()


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_fails_in_the_midst_is_no_whole_answer(client: Client, stream: bool) -> None:
    with pytest.raises(openai.APIError, match="the engine died") as caught:
        client.ask("break", stream=stream)
    assert caught.value.code == "engine_dead"
