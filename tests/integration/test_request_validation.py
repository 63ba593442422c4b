"""Test that bad requests are refused fast, in few words, and that no medium is fetched. No engine runs."""

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import httpx2
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from vllm.config.multimodal import MultiModalDummyOptionsBuiltins
from vllm.entrypoints.anthropic.api_router import router as messages_router
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.responses.api_router import router as responses_router
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.multimodal.media import MediaConnector
from vllm.renderers import base
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import TokenizeParams
from vllm.tokenizers import get_tokenizer

from raymill.emulator.waiting import slowdown
from raymill.serving import accounting, prompt_length
from raymill.serving.api_middleware import ApiMiddleware
from raymill.serving.app import NO_MEDIA, NO_REDIRECTS, restrict
from raymill.serving.body_checks import MAX_ENTRIES, MAX_FIELDS
from raymill.serving.keys import ApiKeys
from raymill.serving.rate_limits import RequestLimits

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
SIDES: list[dict[str, Any]] = [{}, {"truncation_side": "left"}, {"truncation_side": "right"}]
JSON = {"Content-Type": "application/json"}
FOR_SURE_S = 1.0  # CPU seconds on an idle machine; each of these requests takes less than 0.2


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Return a client of vLLM's routes behind the middleware of a replica."""
    secrets = tmp_path_factory.mktemp("secrets") / ".env"
    secrets.write_text("SERVE_API_KEY=the-owner\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRETS_FILE", str(secrets))
        patch.delenv("SECRETS_PREFIX", raising=False)
        app = FastAPI()
        for router in (chat_router, completion_router, responses_router, messages_router):
            app.include_router(router)
        app.state.args = SimpleNamespace(log_error_stack=False)
        app.state.server_load_metrics = 0
        app.state.openai_serving_chat = app.state.openai_serving_completion = Absent()
        init_exception_handler(app)
        restrict(app)
        api = ApiMiddleware(app, ApiKeys(), RequestLimits(10_000, 10_000, 2**22, 600))
        gc.freeze()  # as Serve does in a replica: a collection that walks all imported modules takes a second
        yield TestClient(api, raise_server_exceptions=False, headers={"Authorization": "Bearer the-owner"})
        gc.unfreeze()


class Absent:
    """Answers as vLLM does if the model does not exist."""

    async def create_chat_completion(self, request: Any, _: Any) -> None:
        raise VLLMNotFoundError(f"The model `{request.model}` does not exist.")

    create_completion = create_chat_completion


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **fields}], "max_tokens": 1}


def many(item: Any, name: str = "messages") -> list[Any]:
    return [item] * MAX_ENTRIES[name]


BAD: dict[str, tuple[str, Any]] = {
    "messages that are numbers": (CHAT, {"messages": many(1)}),
    "messages with bad content": (CHAT, {"messages": many({"role": "user", "content": 3})}),
    "tools": (CHAT, message(content="hi") | {"tools": many({"type": "x"}, "tools")}),
    "stop": (CHAT, message(content="hi") | {"stop": many(1, "stop")}),
    "logit_bias": (CHAT, message(content="hi") | {"logit_bias": dict.fromkeys(map(str, range(MAX_FIELDS)), "x")}),
    "token ids": (COMPLETIONS, {"prompt": [["x"] * 800_000]}),
    "prompts": (COMPLETIONS, {"prompt": ["x", *[3] * 10**6]}),
    "input items without a type": (RESPONSES, {"input": many({"type": "x"}, "input")}),
    "input items with bad parts": (RESPONSES, {"input": [{"role": "user", "content": [{}] * 3}] * 4096}),
    "one input item with many parts": (RESPONSES, {"input": [{"role": "user", "content": [{}] * 30_000}]}),
    "an input item that is long": (RESPONSES, {"input": [{"role": "user" + "r" * 10**6, "content": "hi"}]}),
    "tools of responses": (RESPONSES, {"input": "hi", "tools": many({"type": "x"}, "tools")}),
    "include": (RESPONSES, {"input": "hi", "include": ["x"] * 10**5}),
    "messages of Anthropic": (MESSAGES, {"messages": many({"role": "x", "content": 3}), "max_tokens": 1}),
    "parts of Anthropic": (MESSAGES, message(content=[{"type": "x"}] * 30_000)),
    "system of Anthropic": (MESSAGES, message(content="hi") | {"system": [{"type": "x"}] * 30_000}),
    "a quoted value": (CHAT, message(content="hi") | {"temperature": "x" * 10**6}),
    "a quoted value that is not ASCII": (CHAT, message(content="hi") | {"tool_choice": "\U0001f600" * 10**6}),
    "a model that looks like a path": (CHAT, message(content="hi") | {"model": "/a" * 10**6}),
    "a model with odd characters": (COMPLETIONS, {"prompt": "hi", "model": "\U0001f600" * 10**6}),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_gets_a_short_answer_at_once(client: TestClient, kind: str) -> None:
    path, body = BAD[kind]
    raw = json.dumps(body, ensure_ascii=False).encode()
    started = time.process_time()
    answer = client.post(path, content=raw, headers=JSON)
    assert time.process_time() - started < FOR_SURE_S * slowdown()
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 4096


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": [{"role": "user"}, {"role": "user", "content": 3}]}, "messages.1.content: Input should be"),
        (CHAT, message(content="hi") | {"temperature": "warm"}, "temperature: Input should be a valid number"),
        (CHAT, {"model": "m"}, "messages: Field required"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input.0.content.0.text: Field",
        ),
        (COMPLETIONS, {"prompt": ["a", 3]}, "prompt.0: Input should be a valid integer"),
        (CHAT, b"\xff", "the body must be a JSON object"),
    ],
)
def test_one_error_is_reported_with_its_place_and_without_the_input(
    client: TestClient, path: str, body: Any, message: str
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer: httpx2.Response = client.post(path, content=raw, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert "\n" not in answer.text
    assert "'input'" not in answer.text


def test_the_error_of_a_message_that_names_a_path_is_that_of_vllm(client: TestClient) -> None:
    answer = client.post(CHAT, json=message(content="hi") | {"model": "m"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The model `m` does not exist."


# ---------------------------------------------------------------- prompts


def bound_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the limits until the end of a test."""
    monkeypatch.setattr(TokenizeParams, "_text_len_check", TokenizeParams._text_len_check)
    monkeypatch.setattr(base.BaseRenderer, "_tokenize_prompt", base.BaseRenderer._tokenize_prompt)
    monkeypatch.setattr(base, "ThreadPoolExecutor", base.ThreadPoolExecutor)
    prompt_length.install()


def renderer_of(model: Path, side: str = "right") -> HfRenderer:
    """Return vLLM's renderer for a tokenizer, without an engine."""
    config = MagicMock()
    config.model_config.renderer_num_workers = 1
    config.model_config.enable_prompt_embeds = False
    with patch.object(base.mm_registry, "supports_multimodal_inputs", lambda config: False):
        return HfRenderer(config, get_tokenizer(model, truncation_side=side))  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "request_options",
    [{}, *({"truncate_prompt_tokens": count} | more for count in (-1, 10) for more in SIDES)],
    ids=str,
)
def test_characters_are_limited_before_tokenizing(
    assets: Path, monkeypatch: pytest.MonkeyPatch, request_options: dict[str, Any], side: str
) -> None:
    bound_prompts(monkeypatch)
    tokenizer: Any = get_tokenizer(assets / "model", truncation_side=side)
    params = TokenizeParams(max_total_tokens=64, max_output_tokens=16, **request_options)
    text = "".join(f"word {number} " for number in range(10_000))
    try:
        cut = params.apply_pre_tokenization(tokenizer, {"prompt": text})["prompt"]
    except VLLMValidationError:
        assert not request_options
        return
    assert len(cut) <= 48 * tokenizer.max_chars_per_token

    def kept(text: str) -> list[int]:
        return params.apply_post_tokenization(
            tokenizer, {"prompt_token_ids": tokenizer.encode(text, **params.get_encode_kwargs())}
        )["prompt_token_ids"]

    assert kept(cut) == kept(text)


def tokens_of(renderer: HfRenderer, text: str, limit: int, **options: Any) -> list[int]:
    """Return the tokens of a prompt, as a request for a model that reads `limit` tokens gets them."""
    params = TokenizeParams(max_total_tokens=limit, max_output_tokens=0, **options)
    return renderer._tokenize_singleton_prompt({"prompt": text}, params)["prompt_token_ids"]


TEXTS = {
    "words": "".join(f"word {number} " for number in range(800)),
    "one word": "abcdefghij" * 500,
    "spaces": " " * 5000,
    "emoji": "\N{GRINNING FACE}" * 700,
    "special": "<|im_start|>user\nhi<|im_end|>\n" * 100,
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_that_cannot_fit_is_tokenized_in_part_only(
    assets: Path, monkeypatch: pytest.MonkeyPatch, side: str, text: str
) -> None:
    bound_prompts(monkeypatch)
    monkeypatch.setattr(prompt_length, "PIECE", 200)
    monkeypatch.setattr(prompt_length, "LIKELY_CHARACTERS", 0)
    renderer = renderer_of(assets / "model", side)
    monkeypatch.setattr(type(renderer.tokenizer), "max_chars_per_token", 10_000)  # as of other models: any text may fit
    whole = renderer.get_tokenizer()(TEXTS[text])["input_ids"]
    assert tokens_of(renderer, TEXTS[text], len(whole)) == whole  # a prompt that just fits is not cut
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        tokens_of(renderer, TEXTS[text], len(whole) - 1)
    read: list[int] = []
    tokenize = prompt_length._tokenize
    monkeypatch.setattr(
        prompt_length, "_tokenize", lambda *args: [read.append(len(args[1]["prompt"])), tokenize(*args)][1]
    )
    with pytest.raises(VLLMValidationError, match="contains at least 21 input tokens"):
        tokens_of(renderer, TEXTS[text], 20)
    for options in SIDES:
        kept = tokens_of(renderer, TEXTS[text], 20, truncate_prompt_tokens=15, **options)
        assert kept == (whole[-15:] if options.get("truncation_side", side) == "left" else whole[:15])
    assert max(read) < len(TEXTS[text]) / 2


def test_a_long_prompt_delays_no_short_one(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound_prompts(monkeypatch)
    renderer = renderer_of(assets / "model")

    async def tokenize(text: str) -> int:
        record = accounting.RequestRecord("POST /v1/completions")
        record.body_bytes = len(text)
        accounting.current.set(record)
        params = TokenizeParams(max_total_tokens=2**22, max_output_tokens=1)
        return len((await renderer._tokenize_singleton_prompt_async({"prompt": text}, params))["prompt_token_ids"])

    async def check() -> None:
        long = [asyncio.create_task(tokenize("abcdefghij" * 60_000)) for _ in range(3)]
        await asyncio.sleep(0.01)
        long[1].cancel()  # the client disconnects while its prompt waits
        long[0].cancel()  # and this one while the tokenizer works, which nothing can stop
        assert await asyncio.create_task(tokenize("a short prompt")) < 10
        assert not long[2].done()
        assert await long[2] > 15_000

    asyncio.run(asyncio.wait_for(check(), 120))
    renderer.shutdown()


# ---------------------------------------------------------------- media


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a server that redirects each connection to itself, and the paths that were requested."""
    requests: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def accept() -> None:
            with contextlib.suppress(OSError):  # raised when the test has closed the server
                while True:
                    connection, _ = server.accept()
                    with connection:
                        requests.append(connection.recv(4096).decode().split()[1])
                        connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {url}/again\r\n\r\n".encode())

        threading.Thread(target=accept, daemon=True).start()
        yield url, requests
        server.shutdown(socket.SHUT_RDWR)


def test_vllm_itself_fetches_no_media(listener: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second barrier, behind the checks of bodies."""
    url, requests = listener
    allowed = NO_MEDIA["allowed_media_domains"]
    for address in (url, url.replace("http", "HTTP"), url.replace("//", "//nothing.invalid@")):
        with pytest.raises(ValueError, match="allowed domains"):
            MediaConnector(allowed_media_domains=allowed).fetch_image(f"{address}/image.png")
    assert not requests
    for name, value in NO_REDIRECTS.items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(Exception):  # a redirect is an error of some kind
        MediaConnector(allowed_media_domains=["127.0.0.1"]).fetch_image(f"{url}/image.png")
    assert set(requests) == {"/image.png"}


def test_vllm_has_limits_of_all_kinds_of_media() -> None:
    assert NO_MEDIA["limit_mm_per_prompt"] == dict.fromkeys(MultiModalDummyOptionsBuiltins.__annotations__, 0)
