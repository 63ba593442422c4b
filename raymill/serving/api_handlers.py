"""Changes how the handlers of vLLM's APIs stream answers and limit them."""

import contextlib
import functools
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from openai.types import responses as openai_responses
from starlette.datastructures import State
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError

from raymill.serving.accounting import current
from raymill.serving.errors import ApiError, parse_error

log = logging.getLogger("ray.serve")


class ResponseIncompleteEvent(openai_responses.ResponseIncompleteEvent):
    """The last event of an answer of the Responses API that was cut off."""

    response: ResponsesResponse  # type: ignore[assignment]


def install(state: State, dead: Callable[[], ApiError | None]) -> None:
    """Change the handlers in the state of vLLM's app. `dead` returns the error of a dead engine, or None.

    - A stream's response starts after the first output of the engine. So a request that the engine refuses gets the
      same error with and without `stream`. Later errors become an event in the format of the API.
    - An answer of the Responses API that was cut off ends with `response.incomplete`.
    - The Messages API cuts `max_tokens` to what the prompt leaves.

    Relies on the handlers in HANDLERS, whose methods return an async generator for a stream; on their
    `engine_client.generate`, which each sequence passes; on `create_streaming_error_response`, which turns an exception
    of a stream into an event; and on `render_chat_request`, which tokenizes the prompt of a message (vLLM 0.29).
    """
    state.engine_client.generate = _watched(state.engine_client.generate)
    for name, api in HANDLERS.items():
        if handler := getattr(state, name, None):  # a model for embeddings has no such handlers
            handler.create_streaming_error_response = _remembered(handler.create_streaming_error_response)
            created = functools.partial(_start_after_first_output, getattr(handler, api.method), api, dead)
            setattr(handler, api.method, created)
    if messages := getattr(state, "anthropic_serving_messages", None):
        messages.render_chat_request = _with_any_max_tokens(messages.render_chat_request)


def _watched(generate: Callable[..., AsyncGenerator[Any]]) -> Callable[..., AsyncGenerator[Any]]:
    """Return a `generate` that records the first output and the failure of each request."""

    async def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        record = current.get()
        async with contextlib.aclosing(generate(*args, **kwargs)) as outputs:
            try:
                async for output in outputs:
                    if any(one.finish_reason == "error" for one in output.outputs):
                        raise GenerationError("Internal server error")  # as vLLM does, but for some streams too late
                    if record:
                        record.has_output = True
                    yield output
            except Exception as error:
                if record:
                    record.failure = error
                if create_error_response(error).error.code == 500:  # the client is told to see the log
                    log.exception("a request failed")
                raise

    return watched


def _remembered(convert: Callable[..., str]) -> Callable[..., str]:
    """Return a `create_streaming_error_response` that records the error, which need not be the engine's."""

    def remembered(message: str | Exception, *args: Any, **kwargs: Any) -> str:
        record = current.get()
        if record and not record.failure and isinstance(message, Exception):
            record.failure = message
        return convert(message, *args, **kwargs)

    return remembered


async def _start_after_first_output(
    create: Callable[..., Awaitable[Any]], api: "_Api", dead: Callable[[], ApiError | None], *args: Any, **kwargs: Any
) -> Any:
    """Call a handler. If it returns a stream, wait until the engine has generated something.

    Raises:
        Exception: the request failed before. vLLM then answers as it does without `stream`.
    """
    result, record = await create(*args, **kwargs), current.get()
    if not record or not isinstance(result, AsyncGenerator):
        return result
    held: list[Any] = []
    try:
        while not (record.has_output or record.failure):
            held.append(await anext(result))
    except StopAsyncIteration:
        pass
    except Exception as error:
        raise (record.failure or error) from None
    if record.failure:
        await result.aclose()
        raise record.failure

    async def events() -> AsyncIterator[Any]:
        event = None
        async with contextlib.aclosing(result):
            try:
                for event in held:
                    yield event
                async for event in result:
                    if record.failure:
                        break
                    yield api.convert(event)
            except Exception as error:  # streams of the Responses API raise errors instead of sending them
                record.failure = record.failure or error
                log.exception("a stream failed")
            if record.failure:
                yield api.error_event(dead() or _api_error(record.failure), event)

    return events()


def _api_error(failure: Exception) -> ApiError:
    found = create_error_response(failure)
    return parse_error(found.error.code, found.model_dump_json().encode(), {})


def _with_any_max_tokens(render: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a `render_chat_request` that refuses a prompt only if it leaves no room for an answer.

    vLLM refuses a prompt that leaves less than `max_tokens`, although it cuts them to what is left later. Clients of
    Anthropic's API, such as Claude Code, send the maximum of Anthropic's models.
    """

    async def render_any(request: Any) -> Any:
        asked = request.max_tokens, request.max_completion_tokens
        if None not in asked:  # None: the request only counts tokens
            request.max_tokens = request.max_completion_tokens = 1
        try:
            return await render(request)
        finally:
            request.max_tokens, request.max_completion_tokens = asked

    return render_any


def _chat_error(error: ApiError, _: Any) -> str:
    return f"data: {json.dumps(error.body)}\n\n"


def _message_error(error: ApiError, _: Any) -> str:
    return f"event: error\ndata: {json.dumps(error.anthropic_body)}\n\n"


def _response_error(error: ApiError, last: Any) -> Any:
    number = getattr(last, "sequence_number", -1) + 1
    return openai_responses.ResponseErrorEvent(
        type="error", code=error.code, message=error.message, param=error.param, sequence_number=number
    )


def _unchanged(event: Any) -> Any:
    return event


def _with_its_end(event: Any) -> Any:
    """Return an event of the Responses API. vLLM says `response.completed` about an answer that was cut off, too."""
    if event.type != "response.completed" or event.response.status != "incomplete":
        return event
    return ResponseIncompleteEvent(
        type="response.incomplete", response=event.response, sequence_number=event.sequence_number
    )


class _Api(NamedTuple):
    """How an API streams."""

    method: str
    """The handler's method that answers a request."""
    error_event: Callable[[ApiError, Any], Any]
    """Returns the event for an error, which follows the given event."""
    convert: Callable[[Any], Any] = _unchanged
    """Returns the event that a client gets instead of vLLM's."""


HANDLERS = {
    "openai_serving_chat": _Api("create_chat_completion", _chat_error),
    "openai_serving_completion": _Api("create_completion", _chat_error),
    "openai_serving_responses": _Api("create_responses", _response_error, _with_its_end),
    "anthropic_serving_messages": _Api("create_messages", _message_error),
}
