"""Test the HTTP API of `serve_rag` with an OpenAI client, a real generator and a fake model, without Ray."""

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
import uvicorn
from processes import in_background
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raymill.rag.answers import ScoredChunk
from raymill.rag.generator import PROMPT, Generator
from raymill.rag.ingress import MODEL, NO_ANSWER, Ingress
from raymill.serving import accounting
from raymill.serving.api_middleware import ApiMiddleware
from raymill.serving.keys import ApiKeys
from raymill.serving.rate_limits import RequestLimits

SOURCES = [ScoredChunk("a.md", "Apples are red. Pears are green.", 0.9)]
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
QUOTE = "Apples are red. [1]"
RESTRICTED = ("rag|main", "rag", "main")
"""Keys that may use only these models."""
LIMITS = RequestLimits(per_minute=1000, at_once=10, max_body=100_000, timeout_s=30)


class FakeModel:
    """A fake served model. It records its last request, and fails if the question is 'status NUMBER' or 'break'."""

    def __init__(self) -> None:
        self.request: dict[str, Any] = {}
        self.key = ""
        """Name of the key of the last request."""
        self.authorization = ""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        with_keys = ApiMiddleware(app, ApiKeys(), LIMITS, model="main")
        self.server = uvicorn.Server(uvicorn.Config(with_keys, port=self.port, log_level="error"))

    async def _answer(self, request: Request) -> Response:
        self.request = await request.json()
        record = accounting.current.get()
        self.key = record.key if record else ""
        self.authorization = request.headers["authorization"]
        question = self.request["messages"][-1]["content"]
        if question.startswith("status "):
            error = {"message": "no more", "type": "server_error", "param": "stop", "code": "some_code"}
            return JSONResponse({"error": error}, int(question.split()[1]), {"Retry-After": "17"})
        return StreamingResponse(self._chunks(question), media_type="text/event-stream")

    async def _chunks(self, question: str) -> AsyncIterator[str]:
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
        if self.request.get("stream_options", {}).get("include_usage"):
            yield f"data: {json.dumps(common | {'choices': [], 'usage': USAGE})}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture(scope="module", autouse=True)
def _with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("secrets") / ".env"
    others = [f"{key}:sha256={hashlib.sha256(key.encode()).hexdigest()}:models={key}" for key in RESTRICTED]
    file.write_text(f"SERVE_API_KEY=key\nSERVE_API_KEYS={','.join(others)}\n")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SECRETS_FILE", str(file))
        environment.delenv("SECRETS_PREFIX", raising=False)
        yield


@pytest.fixture(scope="module")
def model(_with_keys: None) -> Iterator[FakeModel]:
    server = FakeModel()
    with in_background(server.server):
        yield server


class FakeStream:
    """Stands in for the stream that a deployment handle returns."""

    def __init__(self, parts: AsyncIterator[Any]) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._parts

    def cancel(self) -> None:
        pass


def handles(generator: Generator, sources: list[ScoredChunk]) -> Any:
    """Return fake handles to a retriever, a reranker and the generator, which all run in this process."""

    async def find(question: str) -> list[ScoredChunk]:
        return sources

    async def rank(question: str, chunks: list[ScoredChunk]) -> list[ScoredChunk]:
        return chunks

    def generate(*arguments: Any) -> FakeStream:
        return FakeStream(generator.generate(*arguments))

    stream = SimpleNamespace(generate=SimpleNamespace(remote=generate))
    return (
        SimpleNamespace(find=SimpleNamespace(remote=find)),
        SimpleNamespace(rank=SimpleNamespace(remote=rank)),
        SimpleNamespace(options=lambda **_: stream),
    )


class Client:
    """An OpenAI client for an app in this process."""

    def __init__(
        self, address: str, *, kind: Any = "model", sources: list[ScoredChunk] = SOURCES, key: str = "key"
    ) -> None:
        self._arguments = (kind, address, 10_000)
        self._sources = sources
        self._key = key

    def run(self, call: Any) -> Any:
        """Return the result of `call` with a client."""

        async def called() -> Any:
            deployments = handles(Generator(*self._arguments), self._sources)
            app = await Ingress(deployments, LIMITS, 5, 0).__serve_build_asgi_app__()
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport) as http:
                client = openai.AsyncOpenAI(
                    base_url="http://rag/v1", api_key=self._key, max_retries=0, http_client=http
                )
                return await call(client)

        return asyncio.run(called())

    def ask(self, content: Any = "What are apples?", **more: Any) -> Any:
        """Ask a question. Return the answer, or the chunks of a stream as a list."""

        async def call(client: openai.AsyncOpenAI) -> Any:
            body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": content}]} | more
            answer = await client.chat.completions.create(**body)
            return [chunk async for chunk in answer] if more.get("stream") else answer

        return self.run(call)


@pytest.fixture
def client(model: FakeModel) -> Client:
    return Client(f"http://127.0.0.1:{model.port}")


def test_an_answer_has_the_models_text_and_finish_reason(client: Client) -> None:
    answer = client.ask()
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("one two", "length")
    assert answer.usage.model_dump(exclude_none=True) == USAGE
    assert [source["document"] for source in answer.model_extra["sources"]] == ["a.md"]


def test_a_stream_has_the_models_text_and_finish_reason(client: Client) -> None:
    first, *rest, last = client.ask(stream=True)
    assert [source["document"] for source in first.model_extra["sources"]] == ["a.md"]
    assert first.choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in rest] == ["one ", "two"]
    assert last.choices[0].finish_reason == "length"
    *chunks, usage = client.ask(stream=True, stream_options={"include_usage": True})
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage.model_dump(exclude_none=True)) == ([], USAGE)


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_answer_is_valid(client: Client, stream: bool) -> None:
    answer = client.ask("nothing", stream=stream)
    assert (answer[-1] if stream else answer).choices[0].finish_reason == "length"


@pytest.mark.parametrize(("kind", "sources", "text"), [("quote", SOURCES, QUOTE), ("model", [], NO_ANSWER)])
def test_answers_without_the_model_use_no_tokens_and_honour_stop(
    kind: str, sources: list[ScoredChunk], text: str
) -> None:
    client = Client("http://127.0.0.1:9", kind=kind, sources=sources)
    answer = client.ask()
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
    assert answer.usage.total_tokens == 0
    assert client.ask(stream=True, stream_options={"include_usage": True})[-1].usage.total_tokens == 0
    assert client.ask(stop=[text[5:8], "absent"]).choices[0].message.content == text[: text.index(text[5:8])]


@pytest.mark.parametrize(
    "headers", [{"x-api-key": "key"}, [("Authorization", "Bearer other"), ("Authorization", "Bearer key")]]
)
def test_the_model_gets_the_key_that_was_checked(client: Client, model: FakeModel, headers: Any) -> None:
    async def call(connected: openai.AsyncOpenAI) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": "What are apples?"}]}
        return await connected._client.post("http://rag/v1/chat/completions", json=body, headers=headers)

    assert client.run(call).status_code == 200
    assert model.authorization == "Bearer key"


def test_developer_messages_reach_the_model(client: Client, model: FakeModel) -> None:
    messages = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "What are apples?"}]
    client.ask(messages=messages)
    assert model.request["messages"][1:] == messages


def test_content_parts_are_joined(client: Client, model: FakeModel) -> None:
    client.ask([{"type": "text", "text": "What are"}, {"type": "text", "text": "apples?"}])
    assert model.request["messages"][-1]["content"] == "What are\napples?"


def test_supported_fields_are_passed_to_the_model(client: Client, model: FakeModel) -> None:
    fields = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.5, "seed": -3, "stop": "x"}
    fields |= {"presence_penalty": -1, "frequency_penalty": 1}
    client.ask(**fields, n=1, user="someone", response_format={"type": "text"}, extra_body={"logit_bias": None})
    request = dict(model.request)
    assert request.pop("messages")[0]["content"].startswith(PROMPT)
    expected = fields | {"stop": ["x"], "model": "", "stream": True, "stream_options": {"include_usage": True}}
    assert request == expected


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
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"top_k": 3}}, "top_k"),
    ],
)
def test_unsupported_fields_are_rejected(client: Client, more: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.ask(**more, stream=stream)
    assert caught.value.param == param
    assert "Value error" not in str(caught.value)


def test_a_lone_surrogate_is_rejected(client: Client) -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": "half \ud83d"}]}).encode()
    with pytest.raises(openai.BadRequestError) as caught:
        client.run(lambda connected: connected.post("/chat/completions", content=raw, cast_to=object))
    assert caught.value.param == "messages.0.content"


def test_the_only_model_is_rag(client: Client) -> None:
    assert client.run(lambda connected: connected.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError, match="use `rag`"):
        client.run(lambda connected: connected.models.retrieve("other"))
    for name in ("other", "x" * 50_000):
        with pytest.raises(openai.NotFoundError, match="use `rag`") as caught:
            client.ask(model=name)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 429, 503])
def test_errors_of_the_model_are_passed_to_the_client(client: Client, status: int, stream: bool) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.ask(f"status {status}", stream=stream)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (status, "some_code", "stop")
    assert caught.value.response.headers["retry-after"] == "17"
    assert caught.value.response.json()["error"]["message"] == "no more"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [MODEL, ""])
def test_a_key_for_rag_and_the_main_model_gets_answers(model: FakeModel, name: str, stream: bool) -> None:
    client = Client(f"http://127.0.0.1:{model.port}", key="rag|main")
    answer = client.ask("What are apples?", model=name, stream=stream)
    assert (answer[1].choices[0].delta.content if stream else answer.choices[0].message.content).startswith("one ")
    assert model.key == "rag|main", "the limits of the client's own key must apply"


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_that_lacks_one_of_both_models_learns_which(model: FakeModel, stream: bool) -> None:
    for key, reason in {"rag": "the model that writes the answers; .* inv keys add", "main": "model `rag`"}.items():
        with pytest.raises(openai.NotFoundError, match=f"may not use {reason}") as caught:
            Client(f"http://127.0.0.1:{model.port}", key=key).ask(stream=stream)
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("body", [{}, {"model": ""}, {"model": None}])
def test_a_key_that_may_not_use_the_default_model_does_not_learn_its_name(model: FakeModel, body: Any) -> None:
    url = f"http://127.0.0.1:{model.port}/v1/chat/completions"
    answer = httpx2.post(url, json=body | {"messages": []}, headers={"Authorization": "Bearer rag"})
    assert (answer.status_code, "main" in answer.text) == (404, False)


def test_without_a_model_the_error_names_the_next_command() -> None:
    with pytest.raises(openai.InternalServerError, match="inv submit serve_llm"):
        Client("http://127.0.0.1:9").ask()


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_fails_during_its_answer_is_an_error(client: Client, stream: bool) -> None:
    with pytest.raises(openai.APIError, match="the engine died") as caught:
        client.ask("break", stream=stream)
    assert caught.value.code == "engine_dead"
