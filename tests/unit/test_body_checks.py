"""Test the checks of a request's body, which run before vLLM parses the body."""

import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from raymill.serving.body_checks import (
    MAX_DEPTH,
    MAX_ENTRIES,
    MAX_FIELDS,
    MAX_PARTS,
    MAX_SCHEMA,
    MAX_TEXT,
    Body,
    InvalidBody,
    inspect,
)


def rejected(raw: bytes | dict[str, Any]) -> InvalidBody:
    with pytest.raises(InvalidBody) as caught:
        inspect(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    json.dumps({"message": caught.value.message, "param": caught.value.param}, ensure_ascii=False).encode()
    return caught.value


def accepted(**body: Any) -> Body:
    return inspect(json.dumps(body).encode())


def nested(levels: int) -> Any:
    """Return alternating lists and objects, nested `levels` deep."""
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


# ---------------------------------------------------------------- nesting


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"a":[', b'{"m":"\\ud83d","a":' + b"["])
def test_extreme_nesting_is_rejected(opening: bytes) -> None:
    assert rejected(opening * 100_000).code == "nested_too_deep"


def test_the_nesting_limit_is_exact() -> None:
    assert accepted(a=nested(MAX_DEPTH - 1))
    assert rejected({"a": nested(MAX_DEPTH)}).code == "nested_too_deep"
    assert accepted(a=[[]] * 1000, b="[" * 1000)  # adjacent brackets, and brackets in a string, are not nesting


@pytest.mark.parametrize("name", ["json", "structural_tag"])
def test_the_nesting_limit_applies_to_a_schema_in_a_string(name: str) -> None:
    assert accepted(structured_outputs={name: json.dumps(nested(MAX_DEPTH))})
    error = rejected({"structured_outputs": {name: json.dumps(nested(MAX_DEPTH + 1))}})
    assert (error.code, error.param) == ("nested_too_deep", f"structured_outputs.{name}")
    assert rejected({"structured_outputs": {name: "[" * 16_000}}).code == "nested_too_deep"
    assert accepted(structured_outputs={name: "no JSON"})  # vLLM itself rejects this


def test_the_arguments_of_a_tool_call_are_checked_as_json() -> None:
    def body(arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": [call]}]}

    param = "messages.1.tool_calls.0.function.arguments"
    assert accepted(**body(json.dumps({"a": 1})))
    assert accepted(**body("half an ans"))
    assert rejected(body('{"a":' * 9000)).param == param
    error = rejected(body(r'{"a": "\ud83d"}'))
    assert (error.param, error.code) == (param, "invalid_unicode")


def test_the_arguments_of_a_call_in_a_response_are_checked_as_json() -> None:
    def body(arguments: Any) -> dict[str, Any]:
        return {"input": [{"role": "user"}, {"type": "function_call", "name": "f", "arguments": arguments}]}

    assert accepted(**body(json.dumps({"a": 1})))
    assert rejected(body('{"a":' * 9000)).param == "input.1.arguments"


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_references_to_stored_conversations_are_rejected(field: str) -> None:
    assert rejected({"input": "hi", field: "resp_1"}).param == field
    assert accepted(input="hi", store=True, **{field: None})


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": "\ud83d"}, "stop"),
        ({"stop": ["fine", "half \ude00 of one"]}, "stop.1"),
        ({"bad_words": ["\ud83d"]}, "bad_words.0"),
        ({"vllm_xargs": {"a": "\ud83d"}}, "vllm_xargs.a"),
        ({"vllm_xargs": {"\ud83d": 1}}, "vllm_xargs"),
        ({"\ud83d": 1}, "a field's name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]},
            "messages.0.content.0.text",
        ),
    ],
)
def test_the_path_of_a_lone_surrogate_is_reported(body: dict[str, Any], param: str) -> None:
    error = rejected(body)
    assert (error.param, error.code) == (param, "invalid_unicode")
    assert rejected(json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")).param == param


@pytest.mark.parametrize("text", ["größer", "\U0001f600", "\\ud83d", "[" * 99])
def test_valid_text_passes_unchanged(text: str) -> None:
    for raw in (json.dumps({"stop": text}), json.dumps({"stop": text}, ensure_ascii=False, indent=3)):
        assert inspect(raw.encode()).raw == raw.encode()


@pytest.mark.parametrize(
    "raw",
    [
        *(
            b"",
            b"[]",
            b"3",
            b'"text"',
            b"null",
            b"{",
            b'{"a": 1} x',
            b'{"a": NaN}',
            b'{"a": -Infinity}',
            b"\xff",
            b"x=1",
        ),
        '{"a": 1}'.encode("utf-16"),
        b'{"a": %s}' % (b"9" * 5000),
    ],
)
def test_a_body_that_is_not_a_json_object_is_rejected(raw: bytes) -> None:
    error = rejected(raw)
    assert (error.status, error.code) == (400, "invalid_json")
    assert error.message.startswith("the body must be a JSON object")


# ---------------------------------------------------------------- entries


@pytest.mark.parametrize("field", MAX_ENTRIES)
def test_too_many_entries_are_rejected(field: str) -> None:
    entry = {"role": "user", "content": "hi"} if field in ("messages", "input", "tools") else "x"
    assert accepted(**{field: [entry] * MAX_ENTRIES[field]})
    error = rejected({field: [entry] * (MAX_ENTRIES[field] + 1)})
    assert (error.param, error.code) == (field, "too_many")
    assert f"more than {MAX_ENTRIES[field]:,}" in error.message


@pytest.mark.parametrize(
    "body",
    [
        dict.fromkeys(map(str, range(MAX_FIELDS + 1))),
        {"logit_bias": dict.fromkeys(map(str, range(MAX_FIELDS + 1)), 1)},
        {"messages": [{"role": "user", "content": [dict.fromkeys(map(str, range(MAX_FIELDS + 1)))]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * MAX_PARTS}]},
        {"messages": [{"role": "user", "content": [[]] * MAX_PARTS}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}] * MAX_PARTS}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{}] * MAX_PARTS}]}]},
        {"input": [1, *[{}] * MAX_PARTS, {}]},
        {"input": {"a": [{}] * MAX_PARTS}},
        {"system": [{"type": "text"}] * (MAX_PARTS + 1)},
    ],
)
def test_too_many_fields_and_parts_are_rejected(body: dict[str, Any]) -> None:
    error = rejected(body)
    assert error.code == "too_many"
    assert error.param == (None if len(body) > 1 else next(iter(body)))


def test_long_prompts_and_conversations_pass() -> None:
    assert accepted(input=[5] * 10**5, prompt=[[5] * 10**5])
    assert accepted(input=["text"] * 64)
    parts = [{"type": "text", "text": "hi"}] * 5
    assert accepted(messages=[{"role": "user", "content": parts}] * 4096)


# ---------------------------------------------------------------- media

URL = "http://127.0.0.1/image.png"
DATA = "data:image/png;base64,iVBORw0KGgo="
MEDIA = {
    "image_url": {"type": "image_url", "image_url": {"url": URL}},
    "image_url as a data URI": {"type": "image_url", "image_url": {"url": DATA}},
    "image_url as a string": {"type": "image_url", "image_url": URL},
    "untyped image_url": {"image_url": URL},
    "image_url in a text part": {"type": "text", "text": "hi", "image_url": URL},
    "only a uuid": {"type": "image_url", "image_url": None, "uuid": "u1"},
    "a text part with a uuid": {"type": "text", "text": "hi", "uuid": "u1", "image_url": None},
    "image": {"type": "image", "image": URL},
    "image_pil": {"image_pil": "x"},
    "image_embeds": {"type": "image_embeds", "image_embeds": "eA=="},
    "untyped image_embeds": {"image_embeds": {"a": "eA=="}},
    "video_url": {"type": "video_url", "video_url": {"url": URL}},
    "untyped video_url": {"video_url": URL},
    "audio_url": {"type": "audio_url", "audio_url": {"url": URL}},
    "input_audio": {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}},
    "prompt_embeds": {"type": "prompt_embeds", "data": "eA=="},
    "input_image": {"type": "input_image", "image_url": URL, "detail": "auto"},
    "input_image of a stored file": {"type": "input_image", "file_id": "file-1"},
    "input_file": {"type": "input_file", "file_url": URL},
    "file": {"type": "file", "file": {"file_data": DATA}},
    "Anthropic's image": {"type": "image", "source": {"type": "url", "url": URL}},
    "Anthropic's image in base64": {"type": "image", "source": {"type": "base64", "data": "eA=="}},
    "Anthropic's document": {"type": "document", "source": {"type": "text", "data": "hi"}},
    "an untyped source": {"source": {"type": "url", "url": URL}},
}
PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "a user's message": lambda part: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]},
    "a system message": lambda part: {"messages": [{"role": "system", "content": [part]}, {"role": "user"}]},
    "a tool's message": lambda part: {"messages": [{"role": "tool", "content": [part], "tool_call_id": "1"}]},
    "content that is no list": lambda part: {"messages": [{"role": "user", "content": part}]},
    "a message of a batch": lambda part: {"messages": [[{"role": "user", "content": [part]}]]},
    "a tool result": lambda part: {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [part], "tool_use_id": "1"}]}]
    },
    "Anthropic's system": lambda part: {"system": [part], "messages": [{"role": "user", "content": "hi"}]},
    "an input item": lambda part: {"input": [{"role": "user", "content": [part]}]},
    "the output of a call": lambda part: {"input": [{"type": "function_call_output", "output": [part]}]},
    "input itself": lambda part: {"input": [part]},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MEDIA)
def test_media_are_rejected_everywhere(kind: str, place: str) -> None:
    error = rejected(PLACES[place](MEDIA[kind]))
    assert error.code == "media_not_supported"


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs", "multi_modal_data", "multi_modal_uuids"])
def test_options_of_media_are_rejected(name: str) -> None:
    assert rejected({"messages": [], name: {}}).param == name
    assert accepted(messages=[], **{name: None})


@pytest.mark.parametrize("place", PLACES)
def test_text_and_the_data_of_tool_calls_may_name_media(place: str) -> None:
    assert accepted(**PLACES[place]({"type": "text", "text": URL, "image_url": None, "audio": None}))
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"image_url": URL, "source": {"type": "image"}}}
    assert accepted(**PLACES[place](call))
    assert accepted(tools=[{"type": "function", "function": {"name": "f", "parameters": {"source": {}}}}])


# ---------------------------------------------------------------- schemas and internal fields


LONG = ["some words"] * 10_000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {"regex": "x" * MAX_TEXT + "x"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": LONG}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {"enum": LONG}}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": LONG}}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"parameters": {"enum": LONG}}}]}, "tools"),
        ({"tools": [{"name": "f", "input_schema": {"enum": LONG}}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "schema": {"enum": LONG}}}}, "text"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"enum": LONG}}}}, "output_config"),
    ],
)
def test_a_schema_that_is_too_large_is_rejected(body: dict[str, Any], param: str) -> None:
    error = rejected(body)
    assert (error.param, error.code) == (param, "schema_too_large")
    [field] = body
    assert accepted(**{field: {"json": "x" * 100}, "prompt": "x" * MAX_SCHEMA})  # the limit applies only to schemas


def test_fifty_typical_tools_pass() -> None:
    function = {"name": "f", "description": "in {2024} or a{1,9000} " * 40, "parameters": {"type": "object"}}
    assert accepted(tools=[{"type": "function", "function": function}] * 50)


def test_bad_words_that_would_take_seconds_to_tokenize_are_rejected() -> None:
    assert rejected({"bad_words": ["word " * MAX_TEXT]}).param == "bad_words"
    assert accepted(bad_words=["word", 3])


def test_fields_for_other_vllm_servers_are_removed() -> None:
    body = {"model": "m", "prompt": "größer", "kv_transfer_params": nested(9), "ec_transfer_params": {}}
    assert json.loads(accepted(**body).raw) == {"model": "m", "prompt": "größer"}


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        ({}, {}),
        ({"tool_choice": "auto"}, {}),
        ({"tool_choice": "none"}, {}),
        ({"tool_choice": {"type": "auto"}}, {}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),  # vLLM refuses this
        ({"tool_choice": {"type": "tool", "name": "f"}}, {"tool_choice": {"type": "tool", "name": "f"}}),
    ],
)
def test_an_empty_list_of_tools_is_removed(choice: dict[str, Any], kept: dict[str, Any]) -> None:
    assert json.loads(accepted(messages=[], tools=[], **choice).raw) == {"messages": [], **kept}
    tools = {"tools": [{"type": "function"}], **choice}
    assert json.loads(accepted(**tools).raw) == tools


def test_beam_search_is_rejected() -> None:
    error = rejected({"prompt": "a", "use_beam_search": True, "n": 2})
    assert (error.code, error.param) == ("not_supported", "use_beam_search")
    assert accepted(prompt="a", use_beam_search=False)


def test_encrypted_reasoning_is_removed() -> None:
    user, text = {"role": "user", "content": "hi"}, [{"type": "summary_text", "text": "short"}]
    secret = {"type": "reasoning", "id": "rs_1", "encrypted_content": "abc"}
    items = [user, secret | {"summary": []}, secret | {"summary": text}, {"type": "reasoning", "summary": []}, "odd"]
    raw = accepted(input=items, include=["reasoning.encrypted_content"]).raw
    expected = [user, {"type": "reasoning", "id": "rs_1", "summary": text}, "odd"]
    assert json.loads(raw) == {"input": expected, "include": ["reasoning.encrypted_content"]}
    for unchanged in ("encrypted_content", [items[3]], [{"encrypted": 1}]):
        assert json.loads(accepted(input=unchanged).raw) == {"input": unchanged}


def test_nulls_that_vllm_does_not_accept_are_removed() -> None:
    assert json.loads(accepted(input="hi", background=None, service_tier=None, user=None).raw) == {
        "input": "hi",
        "user": None,
    }
    assert json.loads(accepted(background=False, truncation="auto").raw) == {"background": False, "truncation": "auto"}


@pytest.mark.parametrize("value", [2**63, -(2**70)])
def test_numbers_that_are_too_large_for_the_engine_are_rejected(value: int) -> None:
    assert rejected({"top_k": value}).param == "top_k"
    assert accepted(top_k=2**63 - 1)


# ---------------------------------------------------------------- model and sequences


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({}, 1),
        ({"messages": [{"role": "user"}, {"role": "user"}], "n": 3}, 3),
        ({"prompt": "a", "n": None}, 1),
        ({"prompt": ["a", "b"], "n": 4}, 8),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2, 3], [4]], "n": 512}, 1024),
        ({"prompt": [], "n": 0}, 1),
        ({"prompt": 3, "n": -1}, 1),
        ({"prompt": None, "prompt_embeds": ["a", "b", "c"]}, 3),
        ({"input": ["a", "b"]}, 2),
        ({"input": [[{"role": "user"}], [{"role": "user"}]]}, 2),
        ({"messages": [[{"role": "user"}], [{"role": "user"}]]}, 2),
    ],
)
def test_sequences_are_prompts_times_n(body: dict[str, Any], sequences: int) -> None:
    assert accepted(**body).sequences == sequences


def test_a_huge_n_is_counted() -> None:
    raw = b'{"prompt": ["a", "b"], "n": %s}' % (b"9" * 4300)
    assert f"{inspect(raw).sequences:,}" == "2,000,000,000"


@pytest.mark.parametrize("n", ["8", 8.0, True, [8], "many"])
def test_an_n_that_is_not_an_integer_is_rejected(n: Any) -> None:
    assert rejected({"prompt": "a", "n": n}).param == "n"


@pytest.mark.parametrize(("model", "found"), [("m", "m"), (None, None), (3, None), (["m"], None)])
def test_the_model_is_returned(model: Any, found: str | None) -> None:
    assert accepted(model=model).model == found


# ---------------------------------------------------------------- overhead


@pytest.mark.parametrize("last", ["NaN", r'"\ud83d"'])
def test_reporting_an_error_takes_little_memory(last: str) -> None:
    raw = f'{{"{"k" * 10**6}": [{"1," * 500_000}{last}]}}'.encode()
    tracemalloc.start()
    error = rejected(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(raw)
    assert len(error.message) < 1000


def test_a_typical_request_costs_less_than_50_microseconds() -> None:
    messages = [{"role": role, "content": "some hundred characters of a conversation, " * 2} for role in ("user",) * 10]
    raw = json.dumps({"model": "m", "messages": messages, "max_tokens": 100, "temperature": 0.5}).encode()
    assert 1000 < len(raw) < 2000

    def seconds(count: int = 1000) -> float:
        started = time.thread_time()
        for _ in range(count):
            inspect(raw)
        return (time.thread_time() - started) / count

    assert min(seconds() for _ in range(5)) < 50e-6


@pytest.mark.parametrize("piece", ["[]", '{"a": 1}', "1", '"[{"', '"größer"'])
def test_a_large_request_takes_at_most_eight_times_as_long_as_its_parsing(piece: str) -> None:
    raw = f'{{"a": [{",".join([piece] * (10**6 // len(piece)))}]}}'.encode()

    def seconds(called: Callable[[bytes], object]) -> float:
        started = time.thread_time()
        called(raw)
        return time.thread_time() - started

    gc.freeze()  # otherwise, the garbage collector's share depends on the objects that other tests have left
    inspected, parsed = (min(seconds(called) for _ in range(3)) for called in (inspect, json.loads))
    gc.unfreeze()
    assert inspected < 8 * parsed + 0.01
