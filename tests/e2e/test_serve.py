"""Test a served model: answers, limits, errors, security, settings, updates, `inv bench` and `inv chat`."""

import asyncio
import contextlib
import hashlib
import http.client
import itertools
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import chromium
import dashboards
import grpc
import httpx2
import hypothesis
import openai
import psutil
import pyarrow.parquet as pq
import pytest
import ray
import requests
import schemathesis
import torch
from conftest import TAUGHT
from hypothesis import HealthCheck, Phase, strategies
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
from peft import LoraConfig, PeftModel, get_peft_model
from playwright.sync_api import expect
from processes import children
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview
from rich.console import Console
from safetensors.torch import load_file, save_file
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from jobs import embed, generate, models, serve_llm
from jobs.embed import EmbedOptions
from jobs.generate import GenerateOptions
from jobs.serve_rag import PARTS
from raymill import settings
from raymill.clients import bench, chat
from raymill.demo import assets as demo_assets
from raymill.emulator.waiting import slowdown, wait_for
from raymill.errors import UserError
from raymill.instance_types import INSTANCE_TYPES
from raymill.rag import deployment, generator
from raymill.rag.answers import ScoredChunk
from raymill.rag.options import RagOptions
from raymill.ray_support import aws_sections, job_secrets
from raymill.ray_support.private import serve as private_serve
from raymill.serving import adapters, deploy, http_server, page, preflight, routing_state
from raymill.serving.accounting import PREFIX, RequestRecord
from raymill.serving.errors import ApiError
from raymill.serving.hooks import ApiRequest, Hooks
from raymill.serving.keys import REFRESH_S, ApiKeys
from raymill.serving.options import ModelsOptions, ServeOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")

QUESTIONS = [fact.question for fact in demo_assets.questions(TAUGHT)]
ANSWER_TOKENS = 16
OTHER_KEY = "another-persons-key"
MODELS_OF = {"key-for-another-model": "absent", "key-for-two-models": "tiny|rag"}
"""Keys that may use only these models. Each is also the name of the key."""
FORBIDDEN = "forbidden-word"  # our own check rejects bodies with it
REPLICA_PORTS = range(30_000, 31_000)  # Ray's own default
Greedy = tuple[str, torch.Tensor]
"""An answer, and the log probabilities of its tokens."""
TIE = 1e-4  # if two logits are closer than this, correct implementations may order them differently


FEW = hypothesis.settings(
    max_examples=20,
    derandomize=True,  # new failures should appear only when vLLM changes, not at random
    phases=[Phase.explicit, Phase.generate],  # shrinking a failure takes minutes
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def refuse_a_word(request: ApiRequest) -> None:
    if FORBIDDEN in str(request.body):
        raise ApiError(403, f"{request.key} may not say this to {request.model}", code="word")


def note_tokens(record: RequestRecord) -> None:
    with NOTES.open("a") as file:
        file.write(f"{record.key} {record.status} {record.completion_tokens}\n")


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # replicas cannot import the tests
NOTES = Path(tempfile.mkdtemp()) / "notes"
HOOKS = Hooks((refuse_a_word,), (note_tokens,))


def options(**changes: object) -> ServeOptions:
    """Return the options of `serve_llm` in the local profile, with these changes."""
    return settings.load(ServeOptions, "serve", profile="local").model_copy(update=changes)


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def served(ray_session: None, model_folder: Path) -> Iterator[ServeOptions]:
    """Deploy the model that most tests in this file use."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = Path(os.environ["SECRETS_FILE"])
    digests = {key: hashlib.sha256(key.encode()).hexdigest() for key in MODELS_OF}
    entries = [f"{key}:sha256={digests[key]}:models={names}" for key, names in MODELS_OF.items()]
    file.write_text(f"{file.read_text()}SERVE_API_KEYS=other:{OTHER_KEY},{','.join(entries)}\n")
    deployed = options(model=str(model_folder), port=port, key_requests_per_minute=100_000)
    job_secrets.load()
    preflight.check_model(deployed)
    deploy.deploy_model(deployed, HOOKS)
    yield deployed
    deploy.stop()


@pytest.fixture(scope="module")
def client(served: ServeOptions) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key=os.environ["SERVE_API_KEY"], max_retries=0, timeout=60)


def in_format(schema: dict[str, Any]) -> Any:
    """Return the `response_format` for a schema."""
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def ask(
    client: openai.OpenAI, messages: list[ChatCompletionMessageParam], tokens: int = ANSWER_TOKENS, model: str = "tiny"
) -> str:
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=tokens, temperature=0)
    return answer.choices[0].message.content or ""


# ---------------------------------------------------------------- answers


def test_the_model_has_the_runs_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.usefixtures("served")
def test_the_engine_computes_in_its_own_process() -> None:
    """Its threads leave one core to the server."""
    [(pid, name)] = [(pid, name) for pid, name in children().items() if "VLLM" in name]
    assert name.startswith("VLLM::EngineCor")  # Linux cuts the name
    assert psutil.Process(pid).environ()["OMP_NUM_THREADS"] == str(max(1, (psutil.cpu_count(logical=False) or 1) - 1))


def test_compiled_kernels_outlive_the_cluster(client: openai.OpenAI) -> None:
    # the engine compiles them for its first request with log probabilities, which takes minutes on a busy machine
    patient = client.with_options(timeout=600)
    patient.chat.completions.create(model="tiny", messages=user("hi"), max_tokens=1, logprobs=True)
    assert list(Path(sys.prefix, "kernels").rglob("*.so"))
    assert not list(Path(os.environ["TMPDIR"]).glob("torchinductor*/precompiled_headers/*"))


def test_each_listed_model_can_be_retrieved_and_shows_no_path(served: ServeOptions, client: openai.OpenAI) -> None:
    retrieved = [client.models.retrieve(model.id) for model in client.models.list()]
    assert [(model.id, model.model_dump()["root"]) for model in retrieved] == [("tiny", "tiny")]
    assert served.source not in client.models.with_raw_response.list().text
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("absent/model")
    assert "absent/model" in error_of(caught.value)["message"]


def greedy(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, question: str) -> Greedy:
    """Return the answer of transformers up to the first tie, and the log probabilities of its tokens."""
    chat = tokenizer.apply_chat_template(user(question), add_generation_prompt=True, return_tensors="pt")
    generated = model.generate(
        **chat, do_sample=False, max_new_tokens=ANSWER_TOKENS, output_logits=True, return_dict_in_generate=True
    )
    best = torch.stack(generated.logits).squeeze(1).log_softmax(-1).topk(2).values
    decided = int(torch.cumprod(best[:, 0] - best[:, 1] > TIE, 0).sum())
    tokens = generated.sequences[0, chat["input_ids"].shape[1] :][:decided]
    return tokenizer.decode(tokens, skip_special_tokens=True), best[:decided, 0]


def check_greedy(client: openai.OpenAI, model: str, question: str, expected: Greedy) -> None:
    """Check that the server's answer and its log probabilities are those of `greedy`."""
    text, best = expected
    answer = client.chat.completions.create(
        model=model, messages=user(question), max_tokens=len(best), temperature=0, logprobs=True
    ).choices[0]
    # if an answer ends within a character, vLLM leaves out the character's bytes
    assert (answer.message.content or "").rstrip("\ufffd") == text.rstrip("\ufffd")
    assert answer.logprobs
    logprobs = [token.logprob for token in answer.logprobs.content or []]
    torch.testing.assert_close(torch.tensor(logprobs), best, rtol=0, atol=1e-4)


def test_greedy_decoding_equals_that_of_transformers(client: openai.OpenAI, model_folder: Path) -> None:
    """The test sends more prompts at once than the engine decodes in one batch."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    expected = {fact.question: greedy(model, tokenizer, fact.question) for fact in demo_assets.questions(50)}
    assert len(expected) == 50
    assert len({answer for answer, _ in expected.values()}) > 10
    with ThreadPoolExecutor(20) as clients:
        list(clients.map(lambda question: check_greedy(client, "tiny", question, expected[question]), expected))


def test_the_engine_and_serve_export_the_metrics_of_the_board(client: openai.OpenAI) -> None:
    missing = {name for name in dashboards.shown("serving") if not re.search("gpus|gram", name)}
    for _ in range(2):
        ask(client, user("Is it in the KV cache? " * 15))  # the second time, its first 128 tokens are

    def all_were_exported() -> bool:
        nonlocal missing
        ask(client, user("Hi"))  # because Ray drops the gauges of an idle engine after two intervals
        missing -= dashboards.exported()
        return not missing

    wait_for(all_were_exported, 60, "the metrics of the serving board")


def test_a_stream_has_the_same_text_in_chunks(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=user(QUESTIONS[0]), max_tokens=ANSWER_TOKENS, temperature=0, stream=True
    )
    texts = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert "".join(filter(None, texts)) == ask(client, user(QUESTIONS[0]))
    assert len(list(filter(None, texts))) > 1


def test_structured_output_is_one_of_the_choices(client: openai.OpenAI) -> None:
    choice = {"structured_outputs": {"choice": ["north", "south"]}}
    answer = client.chat.completions.create(model="tiny", messages=user("hi"), temperature=0, extra_body=choice)
    assert answer.choices[0].message.content in ("north", "south")


def test_a_completion_has_its_tokens_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hi", max_tokens=4, temperature=0, logprobs=1)
    assert answer.usage
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].logprobs


def access_log(key: str = "other") -> list[dict[str, Any]]:
    """Return the lines of the access log with the key of this name."""
    session = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1]
    texts = [file.read_text() for file in sorted((session / "logs" / "serve").glob(f"{PREFIX}*.log"))]
    assert not [text for text in texts if OTHER_KEY in text or QUESTIONS[0] in text]
    return [line for text in texts for line in map(json.loads, text.splitlines()) if line["key"] == key]


def test_the_access_log_has_the_tokens_that_the_engine_counts(served: ServeOptions) -> None:
    """Also those of streams that do not ask for their usage, and of requests that a client breaks off."""
    other = openai.OpenAI(base_url=served.url, api_key=OTHER_KEY, max_retries=0, timeout=60)
    before = len(access_log())
    asked = {"model": "tiny", "messages": user(QUESTIONS[0]), "max_tokens": ANSWER_TOKENS, "temperature": 0}
    whole = other.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert list(other.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    many = other.completions.create(model="tiny", prompt=["hi", "hello"], n=2, max_tokens=3)
    with pytest.raises(openai.BadRequestError):
        other.completions.create(model="tiny", prompt="hi", temperature=-3)
    long = {"model": "tiny", "prompt": "hi", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    with other.completions.create(**long, stream=True) as stream:  # type: ignore[call-overload]
        read = len([chunk for chunk, _ in zip(stream, range(5), strict=False)])
    wait_for_engine(False, STOPS_WITHIN_S * slowdown())
    path, body, _ = BODIES["prompts x n"]
    with send(served, path, body, key=OTHER_KEY):
        wait_for_engine(True, 60)
    wait_for(lambda: len(access_log()) == before + 6, 60, "the lines of six requests")
    lines = access_log()[before:]
    assert {line["model"] for line in lines} == {"tiny"}
    assert [line["route"].removeprefix("POST /v1/") for line in lines][1:3] == ["chat/completions", "completions"]
    assert [line["status"] for line in lines] == [200, 200, 200, 400, 200, 499]
    tokens = [(line["prompt_tokens"], line["completion_tokens"]) for line in lines]
    assert whole.usage
    assert tokens[0] == tokens[1] == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert many.usage
    assert tokens[2] == (many.usage.prompt_tokens, many.usage.completion_tokens)
    assert tokens[2][1] == 2 * 2 * 3
    assert tokens[3] == (0, 0)
    assert read <= tokens[4][1] < 200
    assert tokens[5][0] > 0
    assert 0 <= tokens[5][1] < 64 * 200
    assert all(0 < line["first_s"] <= line["total_s"] for line in lines[:5])
    assert lines[5]["first_s"] is None


def test_keys_do_not_share_the_prefix_cache(served: ServeOptions) -> None:
    """Otherwise the time to the first token would reveal what another key has asked."""
    prompt = [TAUGHT] * 200  # token ids; the cache has blocks of 128 tokens

    def cached(key: str, salt: str | None = None) -> bool:
        """Return whether the engine had computed the beginning of the prompt already."""
        asking = openai.OpenAI(base_url=served.url, api_key=key, max_retries=0, timeout=60)
        before = len(access_log("owner")) + len(access_log("other"))
        body = {} if salt is None else {"cache_salt": salt}
        asking.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=body)
        wait_for(lambda: len(access_log("owner")) + len(access_log("other")) > before, 60, "the line of the request")
        return access_log("other" if key == OTHER_KEY else "owner")[-1]["cached_tokens"] > 0

    owner = os.environ["SERVE_API_KEY"]
    assert [cached(key) for key in (owner, owner, OTHER_KEY, OTHER_KEY)] == [False, True, False, True]
    # a salt of the client only divides its own cache
    assert [cached(owner, "x"), cached(owner, "x"), cached(OTHER_KEY, "x")] == [False, True, False]


def test_a_key_for_some_models_sees_and_uses_only_these(served: ServeOptions) -> None:
    limited, allowed = (openai.OpenAI(base_url=served.url, api_key=key, max_retries=0, timeout=60) for key in MODELS_OF)
    assert ask(allowed, user("hi"), tokens=1) == ask(allowed, user("hi"), tokens=1, model="")
    assert [model.id for model in allowed.models.list()] == ["tiny"]
    assert list(limited.models.list()) == []
    for model in ("tiny", "unknown", ""):
        with pytest.raises(openai.NotFoundError):
            ask(limited, user("hi"), model=model)
    with pytest.raises(openai.NotFoundError):
        limited.models.retrieve("tiny")


def test_disconnected_clients_free_the_engine(served: ServeOptions, client: openai.OpenAI) -> None:
    async def seconds(disconnect: bool) -> float:
        """Return how long it takes to read long answers, or disconnect from them, and then get a short one."""
        async with openai.AsyncOpenAI(base_url=served.url, api_key=client.api_key, max_retries=0) as many:

            async def begin(tokens: int) -> openai.AsyncStream[ChatCompletionChunk]:
                return await many.chat.completions.create(
                    model="tiny",
                    messages=user("hi"),
                    max_tokens=tokens,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )

            streams = [await begin(200) for _ in range(48)]
            started = time.perf_counter()
            for stream in streams:
                if disconnect:
                    await stream.close()
                else:
                    assert [chunk async for chunk in stream]
            assert [chunk async for chunk in await begin(1)]
            return time.perf_counter() - started

    completed, disconnected = asyncio.run(seconds(False)), asyncio.run(seconds(True))
    assert disconnected < completed / 3


# ---------------------------------------------------------------- disconnects, timeouts and limits


LONG_ANSWER = {"model": "tiny", "max_tokens": 200, "ignore_eos": True}
"""The engine is busy for many seconds if a key sends as many of these requests at once as its limit allows."""
# seconds on an idle machine, here and in the next two lines; multiply them by slowdown()
REPLACED_WITHIN_S = 25  # it takes 3 s; without `_exit_with_engine`, 30 s
STOPS_WITHIN_S = 2
REFUSED_WITHIN_S = 3  # HAProxy waits one second before it tries again
CLIENTS = 4
LARGER_THAN_HAPROXY_BUFFER = "x" * 1_200_000
BODIES = {
    "complete": ("chat/completions", {"messages": user("hi")}, 64),
    "streamed": ("chat/completions", {"messages": user("hi"), "stream": True}, 64),
    "prompts x n": ("completions", {"prompt": ["hi"] * 8, "n": 8}, 1),
    "prompts x n streamed": ("completions", {"prompt": ["hi"] * 8, "n": 8, "stream": True}, 1),
}


def replicas() -> list[Any]:
    """Return the actors that serve the model."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["name"].startswith("SERVE_REPLICA::llm#Server#")]
    found = []
    for name in names:
        with contextlib.suppress(ValueError):  # the actor may end after it is listed
            found.append(ray.get_actor(name, namespace="serve"))
    return found


def replica() -> Any:
    """Return the only replica."""
    (found,) = replicas()
    return found


def wait_for_engine(busy: bool, timeout_s: float) -> None:
    """Wait until the engine's scheduler reports that it is busy or idle."""

    def ask(actor: Any) -> bool:
        replica = actor._replica_impl
        core = replica._user_callable_wrapper._callable._engine_client.engine_core
        return asyncio.run_coroutine_threadsafe(core.call_utility_async("has_work"), replica._event_loop).result()

    deadline, actor = time.perf_counter() + timeout_s, replica()
    while ray.get(actor.__ray_call__.remote(ask)) != busy:
        assert time.perf_counter() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def limits(**changes: float) -> Iterator[None]:
    """Change the replica's limits temporarily, without restarting its engine."""

    def change(actor: Any, changes: dict[str, float]) -> dict[str, float]:
        middleware = actor._replica_impl._user_callable_wrapper._callable._asgi_app.app
        before = middleware._limits._asdict()
        middleware._limits = middleware._limits._replace(**changes)
        return {name: before[name] for name in changes}

    before = ray.get(replica().__ray_call__.remote(change, changes))
    try:
        yield
    finally:
        ray.get(replica().__ray_call__.remote(change, before))


def send(served: ServeOptions, path: str, body: dict, *, missing: int = 0, key: str = "") -> socket.socket:
    """Send a request without the last `missing` bytes of its body, and return the connection."""
    content = json.dumps(LONG_ANSWER | body).encode()
    lines = [f"POST /v1/{path} HTTP/1.1", "Host: tests", f"Authorization: Bearer {key or os.environ['SERVE_API_KEY']}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "", ""]
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall("\r\n".join(lines).encode() + content[: len(content) - missing])
    return connection


@pytest.mark.parametrize("kind", BODIES)
def test_a_disconnect_stops_the_engine(served: ServeOptions, kind: str) -> None:
    path, body, count = BODIES[kind]
    wait_for_engine(False, 60)
    connections = [send(served, path, body) for _ in range(count)]
    wait_for_engine(True, 60)
    time.sleep(0.2)
    for connection in connections:
        connection.close()
    wait_for_engine(False, STOPS_WITHIN_S * slowdown())


@pytest.mark.parametrize("kind", BODIES)
def test_a_timeout_stops_the_engine(served: ServeOptions, kind: str) -> None:
    path, body, count = BODIES[kind]
    wait_for_engine(False, 60)
    headers = {"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}"}
    request = LONG_ANSWER | body | ({"n": count} if count > 1 else {})
    with limits(timeout_s=slowdown()), ThreadPoolExecutor(1) as background:
        response = background.submit(requests.post, f"{served.url}/{path}", json=request, headers=headers, timeout=60)
        wait_for_engine(True, 60)
        if "streamed" in kind:
            with contextlib.suppress(requests.exceptions.ChunkedEncodingError):  # the stream has started
                assert response.result().status_code == 504
        else:
            answer = response.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    wait_for_engine(False, STOPS_WITHIN_S * slowdown())


@pytest.mark.parametrize("content", ["hi", LARGER_THAN_HAPROXY_BUFFER], ids=["small", "large"])
def test_slow_uploads_only_count_against_their_own_key(served: ServeOptions, content: str) -> None:
    """HAProxy holds a small body until it is complete. A large body reaches the replica and counts against its key."""
    body = {"messages": user(content)}
    request = {"model": "tiny", "messages": user("hi"), "max_tokens": 1}

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return requests.post(f"{served.url}/chat/completions", json=request, headers=headers, timeout=30).status_code

    def wait_until(wanted: int) -> None:
        deadline = time.monotonic() + 20 * slowdown()
        while status(os.environ["SERVE_API_KEY"]) != wanted:
            assert time.monotonic() < deadline

    with contextlib.ExitStack() as slow, limits(body_timeout_s=10 * slowdown()):
        sent = [
            slow.enter_context(send(served, "chat/completions", body, missing=1))
            for _ in range(served.key_requests_at_once + 8)  # spare ones, because wait_until's requests take slots too
        ]
        wait_until(429 if content != "hi" else 200)
        assert status(OTHER_KEY) == 200
        assert status("wrong") == 401
        assert requests.get(f"{served.root}/health", timeout=10).status_code == 200
        for connection in sent:
            connection.settimeout(60)
            assert b" 408 " in connection.recv(100)
        wait_until(200)


def test_a_key_at_its_limit_is_told_when_to_retry(served: ServeOptions) -> None:
    """The requests go through HAProxy while all slots of the replica are taken."""
    path, body, _ = BODIES["complete"]
    room = served.max_ongoing_requests
    with contextlib.ExitStack() as asking:
        for key in (os.environ["SERVE_API_KEY"], OTHER_KEY):
            asking.enter_context(send(served, path, body | {"n": min(room // 2, served.key_requests_at_once)}, key=key))
        wait_for_engine(True, 60)
        headers = {"Authorization": f"Bearer {OTHER_KEY}"}
        answer = requests.post(f"{served.url}/{path}", json=LONG_ANSWER | body, headers=headers, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(answer.headers["Retry-After"]) >= 1
    wait_for_engine(False, STOPS_WITHIN_S * slowdown())


@pytest.mark.parametrize("answers", [1, 48], ids=["many requests", "one request"])
def test_each_key_has_its_share_of_the_engine(served: ServeOptions, client: openai.OpenAI, answers: int) -> None:
    """A key has three times as many sequences as the engine runs at once. Without a share, others wait for two thirds.

    The key loses no token, although sequences are interrupted.
    """
    count = 3 * served.max_num_seqs
    asked: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    asked["stream_options"] = {"include_usage": True}
    other = openai.OpenAI(base_url=served.url, api_key=OTHER_KEY, max_retries=0, timeout=120)
    ended: list[str] = []

    def tokens() -> int:
        """Return the number of generated tokens."""
        for chunk in client.with_options(timeout=120).completions.create(n=answers, stream=True, **asked):
            ended.extend(choice.finish_reason for choice in chunk.choices if choice.finish_reason)
        assert chunk.usage
        return chunk.usage.completion_tokens

    with ThreadPoolExecutor(count) as background:
        counting = [background.submit(tokens) for _ in range(count // answers)]
        wait_for_engine(True, 60)
        for _ in range(3):
            assert ask(other, user("hi"), tokens=1)
        ended_before = len(ended)
        assert sum(one.result() for one in counting) == count * 200
    assert ended_before < count - served.max_num_seqs
    assert ended == ["length"] * count


def test_a_connection_survives_a_request_that_is_too_large(served: ServeOptions) -> None:
    """The test repeats the requests, because whether HAProxy keeps the connection open can depend on timing."""
    small = {"model": "tiny", "messages": user("hi"), "max_tokens": 1}
    too_large = bytes(int(served.max_body_mib * 2**20) + 1)
    with httpx2.Client(headers={"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}"}, timeout=60) as client:
        for _ in range(50):
            assert client.post(f"{served.url}/chat/completions", content=too_large).status_code == 413
            assert client.post(f"{served.url}/chat/completions", json=small).status_code == 200


def test_too_many_sequences_are_rejected(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=["hi"] * 9, n=8, max_tokens=1)
    assert "72, more than 64" in error_of(caught.value)["message"]


# ---------------------------------------------------------------- errors


def test_an_unknown_model_gets_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="absent", messages=user("hi"))
    assert "absent" in error_of(caught.value)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "request_body",
    [{"messages": user("hi"), "temperature": -3}, {"messages": user("word " * 500)}, {"messages": "no list"}],
    ids=["bad parameter", "too long", "malformed"],
)
def test_bad_requests_get_400(client: openai.OpenAI, request_body: dict, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", stream=stream, **request_body)
    assert error_of(caught.value)["message"]


UNKNOWN_TOKEN = {"logit_bias": {"1000000": 1}}
BAD_SCHEMA = {"type": "string", "pattern": "("}
ENDLESS_SCHEMA = in_format({"$ref": "#"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": user("hi"), **UNKNOWN_TOKEN}),
        ("chat/completions", {"messages": user("hi"), "response_format": ENDLESS_SCHEMA}),
        ("completions", {"prompt": [1_000_000]}),
        ("completions", {"prompt": "hi", "response_format": ENDLESS_SCHEMA}),
        ("responses", {"input": "hi", **UNKNOWN_TOKEN}),
        ("responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": BAD_SCHEMA}}}),
        (
            "messages",
            {
                "messages": user("hi"),
                "max_tokens": 4,
                "output_config": {"format": {"type": "json_schema", "schema": BAD_SCHEMA}},
            },
        ),
    ],
    ids=str,
)
def test_a_request_that_the_engine_refuses_gets_the_same_error_with_and_without_stream(
    served: ServeOptions, path: str, body: dict[str, Any]
) -> None:
    """The handlers of these requests return a stream before the engine has seen them."""
    headers = {"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}"}
    answers = [
        requests.post(
            f"{served.url}/{path}", json={"model": "tiny", "stream": stream} | body, headers=headers, timeout=60
        )
        for stream in (False, True)
    ]
    assert answers[0].status_code >= 400
    assert answers[1].status_code == answers[0].status_code
    assert answers[1].json() == answers[0].json()


FLOODERS = 8
SLOW_OUTPUTS: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": ".?" * 8000}},
    {"structured_outputs": {"grammar": "start: A\nA: " + " & ".join(f"/(?s:.*)a.{{{n}}}(?s:.*)/" for n in range(99))}},
    {"structured_outputs": {"grammar": 'start: "a"? x{1000,100000}\nx: "a"{1,1000} "b"{0,1000}\n'}},
    {"response_format": in_format({"type": "string", "pattern": ".?" * 1000})},
    {"response_format": in_format({"type": "number", "multipleOf": 15485863})},
    {
        "response_format": in_format(
            {"type": "object", "patternProperties": {f"^{'a' * n}$": {} for n in range(1, 300)}}
        )
    },
]
"""Each of them took seconds to hours, in which no other schema was compiled, or the engine stood still."""


def test_no_schema_makes_another_key_wait(served: ServeOptions, client: openai.OpenAI) -> None:
    other = client.with_options(api_key=OTHER_KEY)

    def ask_slowly(number: int) -> int:
        body = {"model": "tiny", "messages": user("hi"), "max_tokens": 8, "n": 4, "seed": number}
        body |= SLOW_OUTPUTS[number % len(SLOW_OUTPUTS)]
        headers = {"Authorization": f"Bearer {client.api_key}"}
        return requests.post(f"{served.url}/chat/completions", json=body, headers=headers, timeout=120).status_code

    other.chat.completions.create(
        model="tiny", messages=user("hi")
    )  # the first one with a temperature compiles a kernel
    waits: list[float] = []
    with ThreadPoolExecutor(24) as pool:
        slow = [pool.submit(ask_slowly, number) for number in range(24)]
        while not all(one.done() for one in slow) or len(waits) < 5:
            words = [f"{word} {len(waits)}" for word in ("north", "south")]  # a new schema each time
            started = time.monotonic()
            answer = other.chat.completions.create(
                model="tiny", messages=user("hi"), response_format=in_format({"enum": words})
            )
            waits.append(time.monotonic() - started)
            assert json.loads(answer.choices[0].message.content or "") in words
    assert {one.result() for one in slow} <= {200, 400, 429}
    assert statistics.median(waits) < 2
    assert max(waits) < 10  # 0.3 s on a quiet machine


def test_a_flood_without_a_key_delays_no_client_with_one(served: ServeOptions, client: openai.OpenAI) -> None:
    """5,000 requests without a key, from one address. The replica refuses them, so each costs it some time.

    Half of the threads keep their connections, which HAProxy then refuses. The others wait for their answers.
    """
    address = ("127.0.0.1", served.port)
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"

    def flood(number: int) -> None:
        with contextlib.ExitStack() as held:
            for _ in range(5000 // FLOODERS):
                with contextlib.suppress(OSError):  # HAProxy refuses connections beyond its limit
                    connection = held.enter_context(socket.create_connection(address, 5))
                    connection.sendall(request)
                    if number % 2:
                        connection.recv(4096)
                        connection.close()

    waits: list[float] = []
    transport = httpx2.HTTPTransport(local_address="127.0.0.2")
    headers = {"Authorization": f"Bearer {client.api_key}"}
    with ThreadPoolExecutor(FLOODERS) as pool, httpx2.Client(transport=transport, timeout=60) as keyed:
        flooding = [pool.submit(flood, number) for number in range(FLOODERS)]
        while not all(one.done() for one in flooding) or len(waits) < 20:
            for path in ("/v1/models", "/health"):
                started = time.monotonic()
                assert keyed.get(f"{served.root}{path}", headers=headers).is_success
                waits.append(time.monotonic() - started)
    assert statistics.median(waits) < 1
    assert max(waits) < 5  # 0.3 s on a quiet machine


def test_the_first_schema_does_not_decide_about_the_others(client: openai.OpenAI) -> None:
    """vLLM's default validates with one library, and compiles with the one that the first request has chosen."""
    refused = [{"regex": "\\"}, {"json": {"$ref": "#"}}, {"json": {"not": {}}}]
    answered = [{"choice": ["a\r\nb"]}, {"regex": r"\p{L}"}, {"json": {"type": "string", "maxLength": 1}}]
    for outputs in (refused[0], answered[0], answered[1], refused[1], answered[2], refused[2], *answered):
        body: dict[str, Any] = {"extra_body": {"structured_outputs": outputs}, "max_tokens": 9}
        if outputs in answered:
            assert client.chat.completions.create(model="tiny", messages=user("hi"), **body).choices
        else:
            with pytest.raises(openai.BadRequestError, match="the schema or grammar of the answer cannot be used: "):
                client.chat.completions.create(model="tiny", messages=user("hi"), **body)


def test_the_apis_have_the_habits_that_clients_expect(served: ServeOptions, client: openai.OpenAI) -> None:
    """Clients of other servers send such requests, and read such answers."""
    with client.responses.stream(model="tiny", input="hi", max_output_tokens=2) as events:
        *_, last = events
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")  # type: ignore[union-attr]
    *_, last = client.responses.create(model="tiny", input=QUESTIONS[0], max_output_tokens=200, stream=True)
    assert last.type == "response.completed"
    secret = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"}
    items: Any = [*user("hi"), secret, *user("go on")]
    fields: dict[str, Any] = {"model": "tiny", "max_output_tokens": 2, "tools": None}
    assert client.responses.create(input=items, include=["reasoning.encrypted_content"], **fields).output_text
    assert client.chat.completions.create(model="tiny", messages=user("hi"), max_tokens=2, tools=[]).choices
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=user("word " * 500))
    assert error_of(caught.value)["code"] == "context_length_exceeded"
    stream = client.chat.completions.with_raw_response.create(
        model="tiny", messages=user("hi"), max_tokens=2, stream=True
    )
    assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
    headers = {"x-api-key": client.api_key}
    assert requests.head(f"{served.url}/models", headers=headers, timeout=60).status_code == 200
    message = {"model": "tiny", "messages": user(QUESTIONS[0]), "max_tokens": 32_000, "tools": [], "temperature": 0}
    answer = requests.post(f"{served.url}/messages", json=message, headers=headers, timeout=60).json()
    assert answer["content"][0]["text"] == ask(client, user(QUESTIONS[0]), tokens=200)
    message["messages"] = user("word " * 500)
    refused = requests.post(f"{served.url}/messages", json=message, headers=headers, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("prompt is too long: ")


def test_a_client_of_http_1_0_gets_a_stream_without_chunk_sizes(served: ServeOptions) -> None:
    body = json.dumps({"model": "tiny", "messages": user("hi"), "max_tokens": 4, "stream": True}).encode()
    lines = ["POST /v1/chat/completions HTTP/1.0", f"Authorization: Bearer {os.environ['SERVE_API_KEY']}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, text = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert text.endswith(b"data: [DONE]\n\n")
    assert all(not line or line.startswith(b"data: ") for line in text.split(b"\n"))


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}], ids=str)
def test_tools_without_a_parser_get_400(client: openai.OpenAI, choice: Any) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=user("hi"), tools=tools, tool_choice=choice)
    assert error_of(caught.value)["code"] == "tools_not_supported"


def error_of(caught: openai.APIStatusError) -> dict:
    """Return the error in the response, which must have OpenAI's format."""
    error = caught.response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


# ---------------------------------------------------------------- security


def test_every_route_except_health_and_the_page_needs_the_key(served: ServeOptions) -> None:
    key = os.environ["SERVE_API_KEY"]
    schema = requests.get(f"{served.root}/openapi.json", headers={"Authorization": f"Bearer {key}"}, timeout=10).json()
    routes = [(method, path) for path, methods in schema["paths"].items() for method in methods]
    routes += [
        ("get", "/docs"),
        ("get", "/redoc"),
        ("get", "/openapi.json"),
        ("get", "/absent"),
        ("options", "/v1/models"),
        ("post", "/"),
        ("get", "//"),
        ("get", "/page.html"),
        ("get", "/?key=some"),
    ]
    wrong = ["", "Bearer ", "Bearer wrong", f"Bearer {key}x", f"Bearer {key[:-1]}", key, f"Basic {key}"]
    for method, path in routes:
        for header in wrong:
            answer = requests.request(method, served.root + path, headers={"Authorization": header}, timeout=10)
            if path == "/health":
                assert (answer.status_code, answer.content) == (200, b"")
                continue
            if (method, path) == ("get", "/?key=some"):
                assert (answer.status_code, answer.text) == (200, page.HTML)
                continue
            assert answer.status_code == 401, (method, path, header)
            error = answer.json()["error"]
            assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")
            assert key[:4] not in answer.text


def test_health_answers_head_requests(served: ServeOptions) -> None:
    answer = requests.head(f"{served.root}/health", timeout=10)
    assert (answer.status_code, answer.content) == (200, b"")


def test_clients_cannot_set_headers_that_ray_interprets(served: ServeOptions) -> None:
    """test_haproxy.py tests more of these headers."""
    names = ("serve_multiplexed_model_id", "x-session-id", "x-request-disconnect-disabled", "x-request-timeout-seconds")
    invalid = {name: b"\xff" for name in names}
    assert requests.get(f"{served.root}/health", headers=invalid, timeout=10).status_code == 200
    hurried = {"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}", "x-request-timeout-seconds": "0.05"}
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 100, "ignore_eos": True}
    answer = requests.post(f"{served.url}/completions", json=body, headers=hurried, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 100
    refused = requests.get(f"{served.root}/health", headers={"X-Request-Id": b"\xff"}, timeout=10)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request_id")
    named = requests.get(f"{served.root}/health", headers={"X-Request-Id": "mine-1"}, timeout=10)
    assert named.headers["x-request-id"] == "mine-1"


def test_the_web_page_shows_the_models_answer(served: ServeOptions, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=user(QUESTIONS[0])).choices[0].message.content
    with chromium.running() as browser:
        opened = browser.new_page()
        opened.goto(served.root)
        opened.get_by_label("API key").fill(os.environ["SERVE_API_KEY"])
        opened.get_by_label("Your question").fill(QUESTIONS[0])
        opened.get_by_label("Your question").press("Enter")
        expect(opened.locator(".content")).to_have_text(answer or "", timeout=60_000)
        expect(opened.get_by_role("button", name="Send")).to_be_visible()


@pytest.mark.nightly  # because it takes 45 s
def test_generate_gives_the_same_answers_as_the_server(
    served: ServeOptions, client: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job has an engine of its own, which may batch the questions differently than the server's engine."""
    questions = [fact.question for fact in demo_assets.questions(50)]
    rows = [{"id": number, "messages": user(question)} for number, question in enumerate(questions)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    defaults = settings.load(GenerateOptions, "generate", profile="local")
    folders = {"input": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out"), "model": served.model}
    monkeypatch.setenv("PROFILE", "local")
    generate.main(defaults.model_copy(update=folders | {"max_tokens": ANSWER_TOKENS}))
    answers = pq.read_table(tmp_path / "out" / "answers").to_pylist()
    generated = {questions[int(answer["id"])]: answer["answer"] for answer in answers}
    with ThreadPoolExecutor(len(questions)) as pool:
        assert generated == dict(zip(questions, pool.map(lambda each: ask(client, user(each)), questions), strict=True))


@pytest.fixture(scope="class")
def rag_url(served: ServeOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve answers from three documents. Return the base URL for clients."""
    folder = tmp_path_factory.mktemp("rag")
    documents, index = folder / "documents", str(folder / "index")
    documents.mkdir()
    for topic in RAG_TOPICS:
        (documents / f"{topic}.md").write_text(f"All that is known of {topic} is {len(topic)}.")
    demo_assets.write_embedder(folder / "embedder")
    made = {"input": str(documents), "index": index, "model": str(folder / "embedder"), "questions": ""}
    changes = {"index": index, "generator": "model", "sources": 1, "prompt_characters": 60}
    with mock.patch.dict(os.environ, PROFILE="local"):
        embed.main(settings.load(EmbedOptions, "embed").model_copy(update=made))
        yield deployment.deploy_rag(settings.load(RagOptions, "rag").model_copy(update=changes), PARTS)
    models.main(ModelsOptions(end="rag"))


RAG_TOPICS = ("apples", "rivers", "poems")
OF_APPLES = "What is known of apples?"
ANTHROPIC_KEY = {"Authorization": "", "x-api-key": "KEY"}
ALIKE: dict[str, tuple[dict[str, Any], dict[str, str], int]] = {
    "a question": ({}, {}, 200),
    "x-api-key": ({}, ANTHROPIC_KEY, 200),
    "a scheme in lower case": ({}, {"Authorization": "bearer KEY"}, 200),
    "another key": ({}, {"Authorization": "Bearer wrong"}, 401),
    "no key": ({}, {"Authorization": ""}, 401),
    "another key as x-api-key": ({}, ANTHROPIC_KEY | {"x-api-key": "wrong"}, 401),
    "a developer message": ({"messages": [{"role": "developer", "content": "Be short."}, *user(OF_APPLES)]}, {}, 200),
    "a system message": ({"messages": [{"role": "system", "content": "Be short."}, *user(OF_APPLES)]}, {}, 200),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": OF_APPLES}]}]}, {}, 200),
    "no model": ({"model": ""}, {}, 200),
    "another model": ({"model": "absent"}, {}, 404),
    "empty tools": ({"tools": [], "tool_choice": "auto"}, {}, 200),
    "nulls": ({"tools": None, "stop": None, "temperature": None, "n": None, "stream_options": None}, {}, 200),
    "max_completion_tokens": ({"max_tokens": None, "max_completion_tokens": 2}, {}, 200),
    "fields without effect": ({"user": "me", "metadata": {"a": "b"}, "store": False}, {}, 200),
    "too many tokens": ({"max_tokens": 100_000}, {}, 400),
    "a negative temperature": ({"temperature": -3}, {}, 400),
    "n as text": ({"n": "x"}, {}, 400),
    "no messages": ({"messages": []}, {}, 400),
    "messages as text": ({"messages": "hi"}, {}, 400),
    "half a character": ({"messages": user("\ud83d")}, {}, 400),
    "gzip": ({}, {"Content-Encoding": "gzip"}, 415),
}


@pytest.mark.nightly
class TestRag:
    """`serve_rag` with the served model."""

    def test_it_asks_the_model_with_the_sources(
        self, served: ServeOptions, client: openai.OpenAI, rag_url: str
    ) -> None:
        """The app's answers, complete and streamed, equal the model's own answers to the same prompt."""
        rag = client.with_options(base_url=rag_url)
        for topic in RAG_TOPICS:
            question = user(f"What is known of {topic}?")
            answer = rag.chat.completions.create(
                model="rag", messages=question, max_tokens=ANSWER_TOKENS, temperature=0
            )
            [source] = (answer.model_extra or {})["sources"]
            assert source["document"] == f"{topic}.md"
            shown = generator.numbered([ScoredChunk(source["document"], source["text"], source["score"])])
            expected = ask(client, [{"role": "system", "content": generator.PROMPT + shown}, *question])
            assert answer.choices[0].message.content == expected != ""
            stream = rag.chat.completions.create(
                model="rag", messages=question, max_tokens=ANSWER_TOKENS, temperature=0, stream=True
            )
            texts = [chunk.choices[0].delta.content or "" for chunk in stream]
            assert "".join(texts) == expected
            assert len(list(filter(None, texts))) > 1
        assert {"rag", "tiny"} <= {line["model"] for line in access_log("owner")}
        restricted = rag.with_options(api_key="key-for-two-models")
        assert restricted.chat.completions.create(model="", messages=user(OF_APPLES)).choices[0].message

    @pytest.mark.parametrize("what", ALIKE)
    def test_its_api_behaves_like_the_models(self, served: ServeOptions, rag_url: str, what: str) -> None:
        """Whole and streamed, answers and errors have the same status, headers and format."""
        changes, changed_headers, status = ALIKE[what]
        key = os.environ["SERVE_API_KEY"]
        headers = {"Authorization": f"Bearer {key}"}
        headers |= {name: value.replace("KEY", key) for name, value in changed_headers.items()}
        for stream in (False, True):
            seen = []
            for model, url in (("tiny", served.url), ("rag", rag_url)):
                body = {"model": model, "messages": user(OF_APPLES), "max_tokens": 2, "stream": stream} | changes
                answer = requests.post(f"{url}/chat/completions", json=body, headers=headers, timeout=60)
                assert answer.status_code == status, answer.text
                shown = [answer.headers.get(name) for name in ("content-type", "cache-control", "x-accel-buffering")]
                seen.append((shown, "x-ratelimit-limit-requests" in answer.headers, self.format(answer)))
            assert seen[0] == seen[1]

    def test_its_other_routes_behave_like_the_models(self, served: ServeOptions, rag_url: str) -> None:
        headers = {"x-api-key": os.environ["SERVE_API_KEY"]}
        for method in ("get", "head", "post", "delete"):
            for path in (
                "/v1/models",
                "/v1/models/MODEL",
                "/v1/models/absent",
                "/v1/chat/completions",
                "/health",
                "/absent",
            ):
                answers = [
                    requests.request(method, f"{url.removesuffix('/v1')}{path}".replace("MODEL", model), headers=sent)
                    for sent in ({}, headers)
                    for model, url in (("tiny", served.url), ("rag", rag_url))
                    if (method, path) != ("post", "/v1/chat/completions")
                ]
                for one, other in zip(answers[::2], answers[1::2], strict=True):
                    assert one.status_code == other.status_code, (method, path)
                    assert one.headers.get("allow") == other.headers.get("allow")
                    if one.status_code >= 400:
                        assert self.format(one) == self.format(other)

    def format(self, answer: requests.Response) -> Any:
        """Return the fields of an answer that clients read, and of an error its type and code."""
        if not answer.content:
            return None
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["message"]
            return set(error), error["type"], error["code"]
        if "event-stream" not in answer.headers["content-type"]:
            [choice] = answer.json()["choices"]
            return choice["message"]["role"], choice["index"], choice["finish_reason"]
        *events, end, _ = answer.text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        return end, chunks[0]["delta"], chunks[-1]["finish_reason"]


@pytest.mark.nightly
def test_vllms_load_generator_works(served: ServeOptions, tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("vllm"), "bench", "serve", "--backend=openai-chat"]
    command += [f"--base-url={served.root}", "--endpoint=/v1/chat/completions", "--model=tiny"]
    command += [f"--tokenizer={served.model}", "--dataset-name=random", "--random-input-len=20"]
    command += [f"--random-output-len={ANSWER_TOKENS}", "--num-prompts=24", "--max-concurrency=8", "--ignore-eos"]
    command += ["--save-result", f"--result-dir={tmp_path}", "--result-filename=seen.json"]
    keys = {"OPENAI_API_KEY": os.environ["SERVE_API_KEY"]}
    subprocess.run(command, env=os.environ | keys, check=True, capture_output=True, timeout=300)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["completed"], seen["total_output_tokens"]) == (24, 24 * ANSWER_TOKENS)


def test_a_wrong_key_gives_an_authentication_error(served: ServeOptions) -> None:
    stranger = openai.OpenAI(base_url=served.url, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        stranger.models.list()
    assert error_of(caught.value)["code"] == "invalid_api_key"


@pytest.mark.parametrize("enabled", [True, False])
def test_prefix_routing_sets_the_router(served: ServeOptions, enabled: bool) -> None:
    """The router's choice of replicas is not tested, because that would need two engines."""
    from raymill.serving import app

    application = app.build(served.model_copy(update={"prefix_routing": enabled}), HOOKS, served.root)
    assert (application._ingress_request_router is not None) == enabled
    config = application._bound_deployment._deployment_config.request_router_config
    assert ("Prefix" in config.request_router_class) == enabled


@pytest.mark.nightly  # because it takes 45 s; the next test has the worst requests
def test_no_generated_request_breaks_the_server(served: ServeOptions) -> None:
    """Requests that match the API's schema, and requests that do not, get an answer or a client error."""
    headers = {"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}"}
    api = schemathesis.openapi.from_url(f"{served.root}/openapi.json", headers=headers)
    seen: set[tuple[str, int]] = set()
    for operation in api.get_all_operations():
        for mode in GenerationMode:
            assert isinstance(operation, Ok), operation
            cases = operation.ok().as_strategy(generation_mode=mode)

            @FEW
            @hypothesis.given(case=cases)
            def ask(case: schemathesis.Case) -> None:
                answer = case.call(headers=headers, timeout=60)
                seen.add((case.path, answer.status_code))
                assert answer.status_code < 500, case.as_curl_command()
                if answer.status_code >= 400:
                    is_anthropic = case.path.startswith("/v1/messages")
                    fields = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
                    assert set(answer.json()["error"]) == fields

            with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # raised if no request can be invalid
                ask()
    assert {("/v1/chat/completions", 400), ("/v1/models", 200)} <= seen


@strategies.composite
def hostile(draw: strategies.DrawFn, fields: dict[str, list[str]]) -> tuple[str, bytes, dict[str, bytes]]:
    """Draw the path, body and headers of a request that is valid except for one field and up to two headers."""

    def nested(levels: int, kind: str) -> str:
        opening, closing = {"list": ("[", "]"), "object": ('{"a":', "}"), "schema": (SCHEMA_OPENING, "}}")}[kind]
        return opening * levels + "{}" + closing * levels

    path = draw(strategies.sampled_from(sorted(fields)))
    levels = strategies.sampled_from([1, 30, 64, 300, 600, 3000, 100_000])
    deep = strategies.builds(nested, levels, strategies.sampled_from(["list", "object", "schema"]))
    odd = strategies.sampled_from(ODD)
    valid = strategies.just("null")  # valid for most fields, so that some requests reach the engine
    value = strategies.one_of(deep, odd, strategies.one_of(deep, odd).map(json.dumps), valid)
    inside = strategies.sampled_from(["%s", "[%s]", '{"json": %s}', '{"\\ud83d": %s}', IN_FORMAT])
    field = draw(strategies.sampled_from(fields[path]))
    body = {"model": "tiny", "stream": draw(strategies.booleans())} | VALID_BODIES[path]
    body.pop(field, None)
    raw = f'{json.dumps(body)[:-1]}, "{field}": {draw(inside) % draw(value)}}}'
    printable = strategies.sampled_from([bytes([code]) for code in (*range(0x20, 0x7F), *range(0x80, 0x100))])
    wild = strategies.lists(printable, max_size=20).map(b"".join)
    return path, raw.encode(), draw(strategies.dictionaries(strategies.sampled_from(HEADERS), wild, max_size=2))


VALID_BODIES = {
    "/v1/chat/completions": {"messages": user("hi"), "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": user("hi"), "max_tokens": 1},
}
SCHEMA_OPENING = '{"type": "object", "properties": {"a": '
IN_FORMAT = '{"type": "json_schema", "json_schema": {"name": "a", "schema": %s}}'
ODD = [
    '"\\ud83d"',
    '["x \\udfff"]',
    '{"\\ud83d": 1}',
    "NaN",
    str(2**70),
    "-1",
    "1e999",
    '{"type": "string", "pattern": "a{1,30000}"}',
]
ERROR = rb'\{"error": ?\{"message": ?.*, ?"type": ?.*, ?"param": ?.*, ?"code": ?.*\}\}'
ANTHROPIC_ERROR = rb'\{"type": ?"error", ?"error": ?\{"type": ?.*, ?"message": ?.*\}\}'
HEADERS = ["X-Request-Id", "serve_multiplexed_model_id", "x-request-timeout-seconds", "x-request-disconnect-disabled"]
HEADERS += ["x-session-id", "Accept", "User-Agent", "X-Anything"]


def test_no_hostile_request_breaks_the_server(served: ServeOptions, client: openai.OpenAI) -> None:
    """The requests have deep nesting, lone surrogates and extreme numbers in their fields, and odd bytes in headers."""
    key = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    schemas = requests.get(f"{served.root}/openapi.json", headers=key, timeout=10).json()["components"]["schemas"]
    routes = {
        "/v1/chat/completions": "ChatCompletionRequest",
        "/v1/completions": "CompletionRequest",
        "/v1/responses": "ResponsesRequest",
        "/v1/messages": "AnthropicMessagesRequest",
    }
    fields = {path: sorted({*schemas[name]["properties"]} - {"model"}) for path, name in routes.items()}
    statuses: Counter[int] = Counter()
    failures: list[object] = []

    def kill(path: str, field: str, levels: int) -> tuple[str, bytes, dict[str, bytes]]:
        value = SCHEMA_OPENING * levels + "{}" + "}}" * levels
        return path, json.dumps({"messages": user("hi")})[:-1].encode() + f', "{field}": {value}}}'.encode(), {}

    @hypothesis.settings(FEW, max_examples=400)
    @hypothesis.given(request=hostile(fields))
    @hypothesis.example(request=kill("/v1/chat/completions", "kv_transfer_params", 300))
    def ask_hostile(request: tuple[str, bytes, dict[str, bytes]]) -> None:
        path, raw, headers = request
        connection = http.client.HTTPConnection(served.root.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            with contextlib.suppress(BrokenPipeError):  # a header may be rejected before a long body is read
                connection.request("POST", path, raw, {**key, **headers})
            answer = connection.getresponse()
            text = answer.read()
        statuses[answer.status] += 1
        shape = ANTHROPIC_ERROR if path == "/v1/messages" else ERROR
        shaped = answer.status < 400 or re.fullmatch(shape, text) or re.fullmatch(ERROR, text)  # HAProxy's
        if answer.status >= 500 or not shaped or b'"code": 500' in text:
            failures.append((answer.status, text[:300], path, raw[:300], headers))

    ask_hostile()
    assert not failures
    assert statuses[200] > 4
    assert statuses[400] > 100
    assert ask(client, user("hi"), tokens=1)


@pytest.mark.parametrize("field", [{"structured_outputs": []}, {"vllm_xargs": {"a": 2**70}}])
def test_requests_that_vllm_fails_to_parse_get_400(served: ServeOptions, field: dict[str, object]) -> None:
    headers = {"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}"}
    body = {"messages": user("hello")} | field
    answer = requests.post(f"{served.url}/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert "the request could not be read" in answer.json()["error"]["message"]


def test_cors_is_disabled(served: ServeOptions) -> None:
    headers = {"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}", "Origin": "https://example.org"}
    answer = requests.get(f"{served.url}/models", headers=headers, timeout=10)
    assert answer.ok
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_http_servers_listen_only_on_loopback(served: ServeOptions) -> None:
    """In Ray's own configuration, HAProxy serves its statistics and metrics on all interfaces."""
    ours = children()
    found = {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
        and connection.pid in ours
        and connection.laddr
        and (ours[connection.pid] == "haproxy" or connection.laddr.port in REPLICA_PORTS)
    }
    assert ("127.0.0.1", served.port) in found
    assert len(found) >= 2
    assert {address for address, _ in found} == {"127.0.0.1"}


def test_only_a_replicas_own_port_listens_beyond_loopback(served: ServeOptions) -> None:
    """The test covers Ray, Serve, vLLM and HAProxy. The next test calls the replica's port without the token."""
    ours = children()
    beyond = {
        ours[connection.pid]
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
        and connection.pid in ours
        and connection.laddr
        and connection.laddr.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    }
    assert len(beyond) == 1, beyond
    assert "ServeReplica" in beyond.pop()


def test_serves_calls_to_a_replica_need_the_token(served: ServeOptions) -> None:
    """The port for Serve's calls to a replica listens on all interfaces, and Serve has no setting to change that."""
    (port,) = [
        connection.laddr.port
        for pid, name in children().items()
        if "ServeReplica" in name
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.ip == "::"
    ]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as caught:
        ASGIServiceStub(channel).HandleRequest(ASGIRequest(), timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("path", ["/tokenize", "/load", "/version", "/ping", "/invocations", "/server_info", "/pause"])
def test_vllms_admin_routes_are_removed(served: ServeOptions, path: str) -> None:
    headers = {"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}"}
    for method in ("get", "post"):
        assert requests.request(method, served.root + path, headers=headers, json={}, timeout=10).status_code == 404


def test_keys_can_be_added_and_revoked_without_a_restart(served: ServeOptions) -> None:
    file = Path(os.environ["SECRETS_FILE"])
    before = file.read_text()
    alice = {"Authorization": "Bearer for-alice"}

    def wait_for(status: int) -> None:
        deadline = time.monotonic() + 3 * REFRESH_S
        while requests.get(f"{served.url}/models", headers=alice, timeout=10).status_code != status:
            assert time.monotonic() < deadline
            time.sleep(0.5)

    try:
        file.write_text(f"{before}\nSERVE_API_KEYS=alice:for-alice\n")
        wait_for(200)
    finally:
        file.write_text(before)
    wait_for(401)


def test_the_key_is_in_no_config_log_or_argv(served: ServeOptions, client: openai.OpenAI) -> None:
    ask(client, user("hi"))
    key = os.environ["SERVE_API_KEY"]
    details = private_serve.client().get_serve_details()  # the dashboard shows these details
    assert "Server" in str(details)
    assert key not in str(details)
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if key in " ".join(process.info["cmdline"] or [])
    ]
    session = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1]
    logs = [file for file in (session / "logs").rglob("*") if file.is_file()]
    assert any(b"vllm" in file.read_bytes() for file in logs)
    assert not [file for file in logs if key.encode() in file.read_bytes()]


def test_a_replica_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRETS_FILE", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="SERVE_API_KEY"):
        ApiKeys()


@pytest.mark.parametrize(("model", "downloads"), [("s3://bucket/runs/monday/model", True), ("owner/name", False)])
def test_hub_tokens_are_in_no_runtime_env(model: str, downloads: bool) -> None:
    from raymill.serving import app

    runtime_env = {"env_vars": {"HF_TOKEN": "secret", "PROFILE": "local"}}
    setup = app.NodeSetup(app.llm_config(options(model=model)), ctx_kwargs={"runtime_env": runtime_env})
    asyncio.run(setup.on_before_node_init())
    assert runtime_env == {"env_vars": {"PROFILE": "local"}}
    assert setup.ctx.run_init_node == downloads


# ---------------------------------------------------------------- checks before the start


def test_a_missing_key_is_an_error(monkeypatch: pytest.MonkeyPatch, assets: Path) -> None:
    monkeypatch.setenv("SECRETS_FILE", str(assets / "absent"))
    with pytest.raises(UserError, match=r"SERVE_API_KEY is not set.* >> \.env"):
        preflight.check_api_key()


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no model in {tmp_path}/absent.*inv submit finetune_ddp"):
        preflight.check_model(options(model=str(tmp_path / "absent")))


def test_more_tokens_than_the_model_supports_are_an_error(assets: Path) -> None:
    with pytest.raises(UserError, match=r"max_model_len = 513 .* the 512 tokens"):
        preflight.check_model(options(model=str(assets / "model"), max_model_len=513))


def test_a_rope_scaling_can_raise_the_number_of_tokens(assets: Path) -> None:
    scaling = {"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}}
    preflight.check_model(options(model=str(assets / "model"), max_model_len=1024, engine=scaling))


def test_a_taken_port_is_an_error_and_the_running_model_stays(served: ServeOptions, client: openai.OpenAI) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} .*in use.* set another port in \[serve\]"):
            http_server.check_address(served.model_copy(update={"port": port}))
    assert ask(client, user("hi"), tokens=1)


def test_replicas_that_do_not_fit_are_an_error(served: ServeOptions) -> None:
    with pytest.raises(UserError, match="1 replicas with 99 CPUs each do not fit on the cluster's 4"):
        preflight.check_cpus(served.model_copy(update={"tensor_parallel_size": 33, "pipeline_parallel_size": 3}))


def test_min_replicas_above_max_replicas_is_an_error() -> None:
    with pytest.raises(ValueError, match="min_replicas = 2 is more than max_replicas = 1"):
        ServeOptions.model_validate(options().model_dump() | {"min_replicas": 2})


def test_an_unknown_accelerator_is_an_error() -> None:
    with pytest.raises(UserError, match=r"know the accelerator 'A1000'.* cpu, gpu, .*A100"):
        preflight.check_model(options(accelerator="A1000"))


@pytest.mark.parametrize("profile", ["local", "cluster"])
def test_a_missing_streamer_is_an_error(monkeypatch: pytest.MonkeyPatch, profile: str) -> None:
    monkeypatch.setenv("PROFILE", profile)
    streaming = options(model="s3://bucket/model", engine={"load_format": "runai_streamer"})
    expected = rf"runai_streamer needs the package .*, which is not installed.* to requirements/{profile}\.in"
    with pytest.raises(UserError, match=expected):
        preflight.check_model(streaming)


def test_the_failure_reason_has_no_traceback() -> None:
    message = (
        "The deployment failed to start 1 times in a row.\nTraceback (most recent call last):\nValueError: no room."
    )
    status = {"status": "DEPLOY_FAILED", "status_trigger": "CONFIG_UPDATE_STARTED", "replica_states": {}}
    app = ApplicationStatusOverview(
        status="DEPLOY_FAILED",
        message="Failed to update the deployments ['Server'].",
        last_deployed_time_s=0,
        deployments={"Server": DeploymentStatusOverview(message=message, **status)},
    )
    assert deploy.failure_reason(app) == "no room"


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("runs/finetune_ddp/model", "finetune_ddp"),
        ("s3://bucket/runs/monday/model", "monday"),
        ("owner/name-8B", "owner/name-8B"),
        ("/somewhere/checkpoint", "checkpoint"),
    ],
)
def test_the_default_name_of_a_model_comes_from_its_path(model: str, name: str) -> None:
    assert options(model=model).served_name == name
    assert options(model=model, model_name="mine").served_name == "mine"


def test_on_aws_relative_paths_are_in_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROJECT_DIR", "s3://bucket")
    assert options(model="models/tiny-int4").source == "s3://bucket/models/tiny-int4"
    assert options(model="owner/name").source == "owner/name"


def test_each_name_has_a_unique_path_and_application() -> None:
    names = ["a-b", "a_b", "a.b", "a/b", "a b", "a--b", "a b-", "A-b", "ä", "ö"]
    added = [options(model_name=name, add=True) for name in names]
    assert len({each.path for each in added}) == len({each.app for each in added}) == len(names)
    assert all(re.fullmatch(r"/models/[A-Za-z0-9._-]+", each.path) for each in added)
    assert [each.path for each in added[:3]] == ["/models/a-b", "/models/a_b", "/models/a.b"]


def test_the_cluster_profile_requests_its_gpus() -> None:
    from raymill.serving import app

    section = settings.load(ServeOptions, "serve", profile="cluster")
    wide = section.model_copy(update={"tensor_parallel_size": 4, "pipeline_parallel_size": 2})
    config = app.llm_config(wide)
    assert config.get_engine_config().placement_bundles == [{"GPU": 1}] * 8
    assert config.deployment_config["autoscaling_config"]["max_replicas"] == section.max_replicas


def test_the_settings_about_keys_reach_the_replica() -> None:
    from raymill.serving import app

    changed = options(key_tokens_per_minute=7, share_prefix_cache=True)
    arguments = app.build(changed, HOOKS, changed.root)._bound_deployment.init_kwargs
    assert (arguments["limits"].tokens_per_minute, arguments["share_prefix_cache"]) == (7, True)


@pytest.mark.parametrize("name", INSTANCE_TYPES)
def test_replicas_run_on_the_instance_type_for_serving(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from raymill.serving import app

    monkeypatch.setattr(aws_sections, "load_gpu", lambda: aws_sections.GpuSection(serve_instance_type=name))
    config = app.llm_config(settings.load(ServeOptions, "serve", profile="cluster"))
    needed = {"GPU": 1, f"accelerator_type:{INSTANCE_TYPES[name].gpu.accelerator}": 0.001}
    assert config.get_engine_config().placement_bundles == [needed]


# ---------------------------------------------------------------- models on several GPUs or machines

PARALLEL_ANSWER = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    engine = LLM(
        sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=2**26,
        tensor_parallel_size=int(sys.argv[2]),
    )
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    print("tokens", engine.generate(["def main"], sampling)[0].outputs[0].token_ids)
"""


@pytest.mark.parametrize("instances", [1, 2])
def test_the_autoscaler_starts_the_machines_that_a_model_needs(instances: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallel over the 8 GPUs of each machine, and pipeline parallel over the machines."""
    from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil
    from ray.core.generated.autoscaler_pb2 import GangResourceRequest

    from raymill.serving import app

    section = aws_sections.GpuSection(serve_instance_type="p4d.24xlarge")
    monkeypatch.setattr(aws_sections, "load_gpu", lambda: section)
    served = settings.load(ServeOptions, "serve", profile="cluster")
    changes = {"tensor_parallel_size": 8, "pipeline_parallel_size": instances}
    engine = app.llm_config(served.model_copy(update=changes)).get_engine_config()
    assert engine.placement_strategy == "PACK"  # as few machines as possible
    assert engine.placement_bundles == [{"GPU": 1, "accelerator_type:A100": 0.001}] * 8 * instances

    types = {"cpu": {"CPU": 8}}
    for name in ("g6.12xlarge", "p5.48xlarge", "p4d.24xlarge"):
        kind = INSTANCE_TYPES[name]
        types[name] = {"CPU": 48, "GPU": kind.gpus, f"accelerator_type:{kind.gpu.accelerator}": 1}
    configs = {
        name: NodeTypeConfig(name=name, min_worker_nodes=0, max_worker_nodes=4, resources=resources)
        for name, resources in types.items()
    }
    gang = GangResourceRequest(requests=[ResourceRequestUtil.make(bundle) for bundle in engine.placement_bundles])
    plan = ResourceDemandScheduler(mock.MagicMock()).schedule(
        SchedulingRequest(
            node_type_configs=configs,
            disable_launch_config_check=True,
            max_num_nodes=10,
            gang_resource_requests=[gang],
        )
    )
    assert [(launch.instance_type, launch.count) for launch in plan.to_launch] == [("p4d.24xlarge", instances)]
    assert not plan.infeasible_gang_resource_requests


@pytest.mark.usefixtures("ray_session")
def test_all_bundles_of_a_replica_are_in_one_zone() -> None:
    from raymill.serving import app

    served = settings.load(ServeOptions, "serve", profile="cluster")
    wide = served.model_copy(update={"tensor_parallel_size": 8, "pipeline_parallel_size": 2})
    replica = app.build(wide, HOOKS, wide.root, {"zone": "2"})._bound_deployment._replica_config
    assert replica.placement_group_bundle_label_selector == [{"zone": "2"}] * 16
    assert len(replica.placement_group_bundles) == 16
    anywhere = app.build(wide, HOOKS, wide.root)._bound_deployment._replica_config
    assert anywhere.placement_group_bundle_label_selector is None


def test_the_zone_of_a_running_replica_is_known(served: ServeOptions) -> None:
    (node,) = ray.nodes()
    assert preflight._labels_of_replica(served.app) == node["Labels"]
    assert preflight._labels_of_replica("absent") == {}


@pytest.mark.usefixtures("ray_session")
def test_an_engine_without_gpus_says_so() -> None:
    from raymill.serving import app

    needs_gpus = app.llm_config(settings.load(ServeOptions, "serve", profile="cluster"))
    address = re.escape(ray.util.get_node_ip_address())
    assert re.fullmatch(f"vLLM finds no GPU on {address}, although Ray .*", app.missing_gpu(needs_gpus) or "")
    assert app.missing_gpu(app.llm_config(options())) is None


@pytest.mark.nightly
def test_two_processes_give_the_answers_of_one(assets: Path, tmp_path: Path) -> None:
    """vLLM 0.29 runs tensor parallel on CPUs. Pipeline parallel fails there: KeyError in `update_from_output`."""
    script = tmp_path / "answer.py"
    script.write_text(PARALLEL_ANSWER)

    def answer(processes: int) -> str:
        command = [sys.executable, str(script), str(assets / "model"), str(processes)]
        variables = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # otherwise each process needs a NUMA node
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        [line] = [line for line in done.stdout.splitlines() if line.startswith("tokens")]
        return line

    assert answer(2) == answer(1)


# ---------------------------------------------------------------- inv bench


def test_bench_counts_the_requested_tokens(served: ServeOptions, tmp_path: Path) -> None:
    load = bench.Load(seconds=1, tokens=ANSWER_TOKENS, concurrent=(1, 4))
    bench.bench(served.url, {}, load, Console(), tmp_path)
    for level in json.loads((tmp_path / "bench.json").read_text())["levels"]:
        assert level["tokens_per_s"] == pytest.approx(ANSWER_TOKENS * level["requests_per_s"])
        assert level["errors"] == {}
        assert 0 < level["between_ms"][0] < level["first_ms"][1] * ANSWER_TOKENS


# ---------------------------------------------------------------- inv chat


def test_chat_answers_one_question(served: ServeOptions, client: openai.OpenAI, capsys: pytest.CaptureFixture) -> None:
    chat.chat(served.url, {}, QUESTIONS[0])
    printed = capsys.readouterr().out
    assert printed.startswith(ask(client, user(QUESTIONS[0])))


def test_chat_remembers_the_conversation_until_clear(
    served: ServeOptions, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    typed = iter(["/system be brief", "hello", "word " * 500, "again", "/clear", "/nonsense", "hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    sent: list[list[ChatCompletionMessageParam]] = []
    create = openai.resources.chat.Completions.create
    monkeypatch.setattr(
        openai.resources.chat.Completions,
        "create",
        lambda self, **body: sent.append(list(body["messages"])) or create(self, max_tokens=ANSWER_TOKENS, **body),
    )
    chat.chat(served.url, {})
    printed = capsys.readouterr().out
    brief = {"role": "system", "content": "be brief"}
    first, _, second, third = sent
    assert first == [brief, *user("hello")]
    assert [message["content"] for message in second] == ["be brief", "hello", second[2]["content"], "again"]
    assert second[2]["content"] in printed
    assert "maximum context length" in printed
    assert chat.HELP in printed
    assert third == first


def test_chat_names_the_next_command_if_no_server_answers() -> None:
    with pytest.raises(UserError, match=r"nothing answers at .* inv submit serve_llm"):
        chat.chat("http://127.0.0.1:9/v1", {}, "hi")


def test_chat_reports_a_rejected_key(served: ServeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_API_KEY", "wrong")
    with pytest.raises(UserError, match="rejects the SERVE_API_KEY"):
        chat.chat(served.url, {}, "hi")


# ---------------------------------------------------------------- updates; last, because they replace the model


def test_own_checks_reject_requests_and_own_loggers_get_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="owner may not say this to tiny") as refused:
        ask(client, user(FORBIDDEN))
    assert refused.value.code == "word"
    wait_for(lambda: "owner 403 0" in NOTES.read_text().splitlines(), 10, "the record of the refused request")
    ask(client, user(QUESTIONS[0]))
    wait_for(lambda: re.search(r"owner 200 [1-9]", NOTES.read_text()), 10, "the record")


@pytest.mark.nightly
def test_updates_and_a_canary_lose_no_request_and_a_failed_update_changes_nothing(
    served: ServeOptions, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(os.environ["SECRETS_FILE"])
    keys = file.read_text()
    expected = ask(client, user(QUESTIONS[0]))
    answers: list[str] = []
    seconds: list[float] = []
    done = threading.Event()

    def keep_asking() -> None:
        while not done.is_set():
            started = time.perf_counter()
            answers.append(ask(client, user(QUESTIONS[0])))
            seconds.append(time.perf_counter() - started)
            done.wait(0.1)  # new engines start on the same cores; without a pause, the clients would starve them

    with ThreadPoolExecutor(2) as clients:
        asking = [clients.submit(keep_asking) for _ in range(2)]
        try:
            file.write_text(f"{keys}\nSERVE_API_KEYS=broken\n")  # the update fails before the engine's slow start
            failed = r"tiny is not healthy .*: SERVE_API_KEYS is not NAME:KEY.*\. The previous version keeps running"
            with pytest.raises(UserError, match=failed):
                deploy.deploy_model(served.model_copy(update={"max_model_len": 199}), HOOKS)
            assert max_model_len(client) == served.max_model_len
            file.write_text(keys)
            new = served.model_copy(update={"max_model_len": 200, "canary_percent": 50})
            deploy.deploy_model(new.model_copy(update={"model_name": "another name"}), HOOKS)
            wait_for_answers(routing_state.ROOT, routing_state.CANARY)
            assert max_model_len(client) == served.max_model_len
            models.main(ModelsOptions())
            with mock.patch.multiple(serve_llm, CHECKS=list(HOOKS.checks), LOGGERS=list(HOOKS.loggers)):
                models.main(ModelsOptions(promote=True))
            assert max_model_len(client) == 200
            with pytest.raises(openai.PermissionDeniedError):
                ask(client, user(FORBIDDEN))
            with pytest.raises(UserError, match="there is no canary"):
                models.main(ModelsOptions(roll_back=True))
        finally:
            done.set()
            file.write_text(keys)
        for each in asking:
            each.result()  # raises if a request of this client failed
    assert set(answers) == {expected}
    assert len(answers) > 100
    assert max(seconds) < 10
    assert re.search(r"tiny +/ +50 .*\n.*tiny +/canary +50 ", capsys.readouterr().out)


def wait_for_answers(*paths: str) -> None:
    """Wait until each of these applications has answered a request."""
    deadline = time.monotonic() + 60
    while True:
        apps = ray.get(routing_state.actor().apps.remote())
        if all(apps.get(path, {}).get("requests", 0) - apps.get(path, {}).get("errors", 0) > 0 for path in paths):
            return
        assert time.monotonic() < deadline, apps
        time.sleep(0.5)


def max_model_len(client: openai.OpenAI) -> int:
    """Return the maximum number of tokens of a prompt and its answer together."""
    return client.models.list().data[0].model_dump()["max_model_len"]


@pytest.fixture(scope="module")
def updated(served: ServeOptions, model_folder: Path) -> ServeOptions:
    """Limit the served model to 200 tokens, and serve its adapters, two in one batch. No adapter exists yet."""
    changes = {"max_model_len": 200, "adapters": str(model_folder.parent.parent), "max_loras": 2}
    options = served.model_copy(update=changes)
    deploy.deploy_model(options, HOOKS)
    return options


@pytest.mark.usefixtures("updated")
def test_adapters_are_served_by_the_runs_name_without_a_restart(client: openai.OpenAI, model_folder: Path) -> None:
    assert max_model_len(client) == 200
    runs = model_folder.parent.parent

    def wait_for_answer(expected: str) -> None:
        deadline = time.monotonic() + 3 * adapters.REFRESH_S
        while ask(client, user(QUESTIONS[0]), model="sql") != expected:
            assert time.monotonic() < deadline
            time.sleep(0.5)

    without = ask(client, user(QUESTIONS[0]))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    first = generate_answer(write_adapters(runs / "sql", model_folder, seed=0), tokenizer)
    assert first != without
    wait_for_models(client, "tiny", "sql")
    assert client.models.retrieve("sql").model_dump()["root"] == "tiny"
    wait_for_answer(first)
    assert client.models.retrieve("sql").id == "sql"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert ask(client, user(QUESTIONS[0])) == without
    second = generate_answer(write_adapters(runs / "sql", model_folder, seed=1), tokenizer)
    assert second != first
    wait_for_answer(second)
    write_adapters(runs / "other", model_folder.parent / "another-model", seed=2, weights=model_folder)
    for name in ("other", "../runs/sql", "sql/../sql", "absent", "/sql", "x" * 300):
        with pytest.raises(openai.NotFoundError):
            ask(client, user(QUESTIONS[0]), model=name)
    shutil.rmtree(runs / "sql")
    wait_for_models(client, "tiny")


@pytest.mark.nightly
@pytest.mark.usefixtures("updated")
def test_a_batch_of_models_answers_as_each_does_alone(client: openai.OpenAI, model_folder: Path) -> None:
    """The base model and its adapters, in batches of every mix, have the log probabilities of transformers.

    There are more adapters than the engine keeps, so that each of its slots holds one, and they replace each other.
    """
    runs, names = model_folder.parent.parent, ("batch-1", "batch-2", "batch-3")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    expected = {("tiny", question): greedy(base, tokenizer, question) for question in QUESTIONS}
    for seed, name in enumerate(names):
        adapted = write_adapters(runs / name, model_folder, seed=seed)
        expected |= {(name, question): greedy(adapted, tokenizer, question) for question in QUESTIONS}
    wait_for_models(client, "tiny", *names)
    for model, question in expected:
        check_greedy(client, model, question, expected[model, question])
    mixed = [one for pair in itertools.combinations(expected, 2) for one in pair]
    with ThreadPoolExecutor(6) as clients:
        list(clients.map(lambda one: check_greedy(client, one[0], one[1], expected[one]), mixed))
    for name in names:
        shutil.rmtree(runs / name)
    wait_for_models(client, "tiny")


@pytest.mark.usefixtures("updated")
def test_a_deleted_or_damaged_adapter_does_not_end_the_engine(client: openai.OpenAI, model_folder: Path) -> None:
    """The engine has evicted two of the four adapters, and loads them again when they are asked."""
    runs, names = model_folder.parent.parent, ("moved", "cut", "kept-1", "kept-2")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    expected = {}
    for seed, name in enumerate(names):
        adapted = write_adapters(runs / name, model_folder, seed=seed)
        expected[name] = greedy(adapted, tokenizer, QUESTIONS[0])
    for name in ("broken", "infinite"):
        write_adapters(runs / name, model_folder, seed=9)
    for name, value in {"broken": torch.nan, "infinite": torch.inf}.items():
        file = runs / name / "adapter" / "adapter_model.safetensors"
        save_file({key: tensor * value for key, tensor in load_file(file).items()}, file)
    wait_for_models(client, "tiny", *sorted(names))
    with pytest.raises(openai.BadRequestError, match=r"the adapter of broken cannot be used: .* not finite"):
        ask(client, user("hi"), model="broken")
    (engine,) = [pid for pid, name in children().items() if "EngineCore" in name]
    for name in names:
        check_greedy(client, name, QUESTIONS[0], expected[name])
    (runs / "moved").rename(runs.parent / "moved")
    weights = runs / "cut" / "adapter" / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    for name in names:
        with contextlib.suppress(openai.NotFoundError):  # the server has noticed that the run is gone
            check_greedy(client, name, QUESTIONS[0], expected[name])
    wait_for_models(client, "tiny", *sorted(names[1:]))
    for name in names[1:]:
        check_greedy(client, name, QUESTIONS[0], expected[name])
    assert engine in children()
    for name in (*names[1:], "broken", "infinite"):
        shutil.rmtree(runs / name)
    shutil.rmtree(runs.parent / "moved")
    wait_for_models(client, "tiny")


@pytest.mark.usefixtures("updated")
def test_names_of_unknown_models_take_no_memory(client: openai.OpenAI) -> None:
    """With adapters, vLLM keeps a lock for each name that it gets."""
    (replica,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica" in process.name() and any("EngineCore" in child.name() for child in process.children())
    ]

    def ask_for_long_names(first: int) -> int:
        """Ask for 20 models, and return the memory of the replica in bytes."""
        for number in range(first, first + 20):
            with pytest.raises(openai.NotFoundError) as caught:
                ask(client, user("hi"), model=f"{number}" + "x" * 3_900_000)
            assert len(str(caught.value)) < 1000
        return replica.memory_info().rss

    *_, before = map(ask_for_long_names, (10, 30, 50))  # the allocator keeps what it needs for a few requests
    *_, after = map(ask_for_long_names, (70, 90))
    assert after - before < 20 * 3_900_000


def wait_for_models(client: openai.OpenAI, *names: str) -> None:
    """Wait until the server lists these models."""

    def listed() -> list[str]:
        return [model.id for model in client.models.list()]

    wait_for(lambda: listed() == list(names), 3 * adapters.REFRESH_S, f"the models {names}")


def write_adapters(run: Path, base: Path, *, seed: int, weights: Path | None = None) -> PeftModel:
    """Write an adapter for `base` that changes its answers. Return the adapted model."""
    model = AutoModelForCausalLM.from_pretrained(weights or base, dtype=torch.float32)
    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(str(run / "adapter"))
    return adapted


def generate_answer(model: PeftModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the answer of transformers to the first question."""
    prompt = tokenizer.apply_chat_template(user(QUESTIONS[0]), add_generation_prompt=True, return_tensors="pt")
    generated = model.generate(**prompt, do_sample=False, max_new_tokens=ANSWER_TOKENS)
    return tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_dead_engine_is_replaced_at_once(updated: ServeOptions) -> None:
    """Until the engine is replaced, each client gets an answer or a 503 with a time to retry.

    This is the last test that needs an engine, because it does not wait until the new one has started.
    """
    old, factor = replica()._actor_id, slowdown()
    headers, url = {"Authorization": f"Bearer {os.environ['SERVE_API_KEY']}"}, f"{updated.url}/chat/completions"
    one = {"model": "tiny", "messages": user("hi"), "max_tokens": 1}
    many = one | {"n": 32, "max_tokens": 150, "ignore_eos": True}
    over = threading.Event()

    def ask_until_over() -> list[str]:
        outcomes = []
        while not over.is_set():
            started = time.perf_counter()
            try:
                outcomes.append(outcome(requests.post(url, json=one, headers=headers, timeout=60)))
            except requests.RequestException as error:
                outcomes.append(repr(error))
            if time.perf_counter() - started > REFUSED_WITHIN_S * factor:
                outcomes.append("late")
        return outcomes

    with ThreadPoolExecutor(CLIENTS + 1) as background:
        response = background.submit(requests.post, url, json=many, headers=headers, timeout=120)
        wait_for_engine(True, 60)
        clients = [background.submit(ask_until_over) for _ in range(CLIENTS)]
        time.sleep(0.5)
        (engine,) = [pid for pid, name in children().items() if "EngineCore" in name]
        psutil.Process(engine).kill()
        killed_at = time.perf_counter()
        try:
            while not (found := [each for each in replicas() if each._actor_id != old]):
                assert time.perf_counter() < killed_at + REPLACED_WITHIN_S * factor
                time.sleep(0.05)
            time.sleep(1)
        finally:
            over.set()
        answer = response.result()
        outcomes = Counter(outcome for client in clients for outcome in client.result())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    assert int(answer.headers["Retry-After"]) >= 1
    assert len(found) == 1
    assert outcomes.keys() <= {"answered", "refused"}
    assert outcomes["refused"]


def outcome(answer: requests.Response) -> str:
    """Return "answered", "refused" for a 503 with a time to retry, or the text of any other response."""
    if answer.status_code == 200:
        return "answered"
    if answer.status_code == 503 and "message" in answer.json()["error"] and int(answer.headers["Retry-After"]) >= 1:
        return "refused"
    return f"{answer.status_code}: {answer.text}"
