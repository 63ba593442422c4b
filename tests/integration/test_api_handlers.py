"""Test how the handlers of vLLM's APIs stream, with fakes that fail like vLLM's. test_serve.py has real ones."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import responses

if sys.platform != "linux":
    pytest.skip("vLLM's CPU build exists for Linux only", allow_module_level=True)

from vllm.entrypoints.openai.responses.protocol import ResponseCompletedEvent, ResponsesResponse
from vllm.exceptions import VLLMValidationError

from raymill.serving import accounting, api_handlers
from raymill.serving.errors import ApiError, engine_dead

REFUSED = VLLMValidationError("no such token", parameter="logit_bias")
OUTPUT = SimpleNamespace(outputs=[SimpleNamespace(finish_reason=None)])
FAILED = SimpleNamespace(outputs=[SimpleNamespace(finish_reason="error")])
APIS = ["chat", "completion", "responses", "messages"]
NAMES = {api: f"openai_serving_{api}" for api in APIS} | {"messages": "anthropic_serving_messages"}


class FakeHandler:
    """Streams the outputs of a fake engine like one of vLLM's handlers."""

    def __init__(self, api: str, engine: SimpleNamespace) -> None:
        self._api, self._engine = api, engine
        self.closed = False
        setattr(self, api_handlers.HANDLERS[NAMES[api]].method, self.create)

    def create_streaming_error_response(self, error: Exception) -> str:
        return json.dumps({"error": {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}})

    async def render_chat_request(self, request: Any) -> tuple[int, int]:
        return request.max_tokens, request.max_completion_tokens

    async def create(self, request: Any) -> AsyncGenerator[Any]:
        stream = {"responses": self._responses, "messages": self._messages}.get(self._api, self._chat)
        return stream(request)

    async def _chat(self, request: Any) -> AsyncGenerator[str]:
        first = True
        try:
            if request == "no parser":
                raise REFUSED
            async for output in self._engine.generate():
                if first and self._api != "completion":
                    yield "data: role\n\n"  # also for an output that has failed
                first = False
                if output.outputs[0].finish_reason == "error":
                    raise ValueError("Internal server error")
                yield "data: text\n\n"
        except Exception as error:
            yield f"data: {self.create_streaming_error_response(error)}\n\n"
        finally:
            self.closed = True
        yield "data: [DONE]\n\n"

    async def _messages(self, request: Any) -> AsyncGenerator[str]:
        async for item in self._chat(request):
            if "error" in item:
                yield 'event: error\ndata: {"type": "error", "error": {"message": "2 validation errors for Chat"}}\n\n'
                return
            yield f"event: other\n{item}"

    async def _responses(self, request: Any) -> AsyncGenerator[Any]:
        created = {"sequence_number": 0, "response": SimpleNamespace(status="in_progress")}
        yield SimpleNamespace(type="response.created", **created)
        if request == "no parser":
            raise REFUSED
        async for output in self._engine.generate():
            if output.outputs[0].finish_reason == "error":
                raise ValueError("no such event")
            yield SimpleNamespace(type="response.output_text.delta", sequence_number=1)


def handler(api: str, outputs: list[Any], dead: Callable[[], ApiError | None] = lambda: None) -> FakeHandler:
    """Return an installed handler whose engine yields these outputs, and raises those that are errors."""

    async def generate() -> AsyncGenerator[Any]:
        for output in outputs:
            await asyncio.sleep(0)
            if isinstance(output, Exception):
                raise output
            yield output

    engine = SimpleNamespace(generate=generate)
    made = FakeHandler(api, engine)
    api_handlers.install(SimpleNamespace(engine_client=engine, **{NAMES[api]: made}), dead)  # type: ignore[arg-type]
    return made


def stream(made: FakeHandler, api: str, request: str = "") -> list[Any]:
    """Return the events of a stream. Raise the error of a request that gets no stream."""

    async def read() -> list[Any]:
        accounting.current.set(accounting.RequestRecord("POST /"))
        events = await getattr(made, api_handlers.HANDLERS[NAMES[api]].method)(request)
        return [event async for event in events]

    return asyncio.run(asyncio.wait_for(read(), 60))


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("outputs", "request_", "message"),
    [
        ([REFUSED], "", "no such token"),
        ([FAILED], "", "Internal server error"),
        ([OUTPUT], "no parser", "no such token"),
    ],
)
def test_a_request_that_fails_before_the_first_output_gets_no_stream(
    api: str, outputs: list[Any], request_: str, message: str
) -> None:
    """vLLM then answers as it does without `stream`."""
    made = handler(api, outputs)
    with pytest.raises(Exception, match=message) as caught:
        stream(made, api, request_)
    assert not isinstance(caught.value, RuntimeError | StopAsyncIteration)
    assert made.closed or api == "responses"


@pytest.mark.parametrize("api", APIS)
def test_a_stream_has_all_its_events(api: str) -> None:
    expected = {
        "chat": ["data: role\n\n", "data: text\n\n", "data: text\n\n", "data: [DONE]\n\n"],
        "completion": ["data: text\n\n", "data: text\n\n", "data: [DONE]\n\n"],
        "messages": [f"event: other\ndata: {text}\n\n" for text in ("role", "text", "text", "[DONE]")],
    }
    events = stream(handler(api, [OUTPUT, OUTPUT]), api)
    if api == "responses":
        assert [event.type for event in events] == ["response.created"] + ["response.output_text.delta"] * 2
    else:
        assert events == expected[api]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("failure", "dead", "message"),
    [
        (REFUSED, None, "no such token"),
        (FAILED, None, "the server failed to process this request; see its log"),
        (ValueError("inside"), None, "inside"),
        (KeyError("inside"), engine_dead(), engine_dead().message),
    ],
)
def test_a_later_failure_is_the_last_event_in_the_format_of_the_api(
    api: str, failure: Any, dead: ApiError | None, message: str
) -> None:
    *_, before, last = stream(handler(api, [OUTPUT, failure], lambda: dead), api)
    if api == "responses":
        assert before.type == "response.output_text.delta"
        assert isinstance(last, responses.ResponseErrorEvent)
        assert last.message.startswith(message)
        assert last.sequence_number == 2
        return
    assert before.endswith("data: text\n\n")
    event = "event: error\n" if api == "messages" else ""
    assert last.startswith(f"{event}data: ")
    body = json.loads(last.removeprefix(f"{event}data: "))
    assert body["error"]["message"].startswith(message)
    fields = {"type", "message"} if api == "messages" else {"message", "type", "param", "code"}
    assert set(body["error"]) == fields
    assert body["error"]["type"] in ("invalid_request_error", "server_error", "api_error", "overloaded_error")


@pytest.mark.parametrize("api", APIS)
def test_a_client_that_leaves_before_the_first_output_stops_the_engine(api: str) -> None:
    async def check() -> None:
        running, stopped = asyncio.Event(), asyncio.Event()

        async def generate() -> AsyncGenerator[Any]:
            try:
                running.set()
                await asyncio.Event().wait()
                yield OUTPUT
            finally:
                stopped.set()

        engine = SimpleNamespace(generate=generate)
        made = FakeHandler(api, engine)
        state: Any = SimpleNamespace(engine_client=engine, **{NAMES[api]: made})
        api_handlers.install(state, lambda: None)
        accounting.current.set(accounting.RequestRecord("POST /"))
        task = asyncio.ensure_future(getattr(made, api_handlers.HANDLERS[NAMES[api]].method)(""))
        await running.wait()
        task.cancel()
        await asyncio.wait({task})
        await stopped.wait()

    asyncio.run(asyncio.wait_for(check(), 60))


@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_a_response_that_was_cut_off_ends_as_incomplete(status: str) -> None:
    response = {"id": "resp_1", "model": "m", "output": [], "parallel_tool_calls": True, "temperature": 1.0}
    response |= {"tool_choice": "auto", "tools": [], "top_p": 1.0, "background": False, "max_output_tokens": 1}
    response |= {"service_tier": "auto", "status": status, "truncation": "disabled", "usage": None}
    made = ResponsesResponse.model_validate(response)
    event = ResponseCompletedEvent(type="response.completed", sequence_number=7, response=made)
    sent = api_handlers.HANDLERS["openai_serving_responses"].convert(event)
    found = json.loads(sent.model_dump_json(by_alias=True))
    assert (found["type"], found["sequence_number"]) == (f"response.{status}", 7)
    assert found["response"] == json.loads(made.model_dump_json(by_alias=True))


def test_a_message_may_ask_for_more_tokens_than_the_prompt_leaves() -> None:
    """vLLM then generates what is left."""

    async def check() -> None:
        request = SimpleNamespace(max_tokens=32_000, max_completion_tokens=32_000)
        assert await handler("messages", []).render_chat_request(request) == (1, 1)
        assert (request.max_tokens, request.max_completion_tokens) == (32_000, 32_000)
        only_counted = SimpleNamespace(max_tokens=None, max_completion_tokens=None)
        assert await handler("messages", []).render_chat_request(only_counted) == (None, None)
        assert await handler("chat", []).render_chat_request(request) == (32_000, 32_000)

    asyncio.run(check())
