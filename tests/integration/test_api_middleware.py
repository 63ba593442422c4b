"""Test the middleware in front of a served model: keys, limits, disconnects, the queue, errors and overhead."""

import asyncio
import contextlib
import gc
import gzip
import io
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raymill.serving import accounting, hooks, replica_exit
from raymill.serving import keys as keys_module
from raymill.serving.accounting import AccessLog, MetricsMiddleware, RequestRecord
from raymill.serving.api_middleware import MAX_DISCARDED_BODIES, ApiMiddleware
from raymill.serving.errors import ApiError
from raymill.serving.hooks import ApiRequest
from raymill.serving.keys import ApiKeys
from raymill.serving.model_router import KnownModels, ModelRouter
from raymill.serving.rate_limits import RateLimiter, RequestLimits
from raymill.serving.request_queue import QueueFull, QueueMiddleware, Slots
from raymill.serving.routing_state import NO_ROUTES, RequestOutcome

BODY = 1000
OWNER = {"Authorization": "Bearer the-owner"}
ALICE = {"Authorization": "Bearer for-alice"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a secrets file with three keys."""
    file = tmp_path / ".env"
    file.write_text("SERVE_API_KEY=the-owner\nSERVE_API_KEYS=alice:for-alice, bob:for-bob\n")
    monkeypatch.setenv("SECRETS_FILE", str(file))
    monkeypatch.delenv("SECRETS_PREFIX", raising=False)
    return file


def fake_app() -> FastAPI:
    """Return an app with routes that count bytes, wait, stream or fail, with errors in all formats of vLLM's app."""
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    @app.get("/wait")
    async def wait(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    @app.get("/stream")
    async def stream(seconds: float) -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            yield "first"
            await asyncio.sleep(seconds)
            yield "last"

        return StreamingResponse(pieces())

    @app.get("/fail")
    async def fail(status: int) -> Response:
        if status == 500:
            raise ValueError("the inside")
        if status == 400:
            return PlainTextResponse("in plain text", 400)
        if status == 409:
            return JSONResponse({"error": {"message": "shaped", "param": "n", "code": "too_many"}}, 409)
        if status == 422:
            return JSONResponse({"error": {"message": "vLLM's", "param": None, "code": 422}}, 422)
        raise HTTPException(status, "in words")

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return app


def client_of(
    app: ASGIApp | None = None,
    *,
    per_minute: int = 100,
    at_once: int = 100,
    timeout_s: float = 5,
    tokens_per_minute: int = 0,
) -> TestClient:
    limits = RequestLimits(per_minute, at_once, BODY, timeout_s, tokens_per_minute=tokens_per_minute)
    middleware = ApiMiddleware(app or fake_app(), ApiKeys(), limits)
    return TestClient(middleware, raise_server_exceptions=False)


def with_middleware(app: ASGIApp, limits: RequestLimits, alive: Callable[[], bool] = lambda: True) -> ApiMiddleware:
    """Return an app behind the queue and `ApiMiddleware`, as in a replica."""
    return ApiMiddleware(QueueMiddleware(app, limits, alive), ApiKeys(), limits, alive)


def sequence(prompt: int, generated: int) -> SimpleNamespace:
    """Return what the accounting reads of vLLM's state of a sequence."""
    detokenizer = SimpleNamespace(num_output_tokens=lambda: generated)
    return SimpleNamespace(prompt_len=prompt, num_cached_tokens=0, request_index=0, detokenizer=detokenizer)


def error(answer: httpx2.Response, status: int) -> dict:
    """Return the error in an answer, which must have OpenAI's format and this status."""
    assert answer.status_code == status
    found = answer.json()
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return found["error"]


# ---------------------------------------------------------------- keys


def test_each_key_is_valid_and_has_its_name(file: Path) -> None:
    keys = ApiKeys()
    found = [keys.name_of(f"Bearer {key}".encode()) for key in ("the-owner", "for-alice", "for-bob", "for-carol", "")]
    assert found == ["owner", "alice", "bob", None, None]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_scheme_is_case_insensitive(file: Path, scheme: str) -> None:
    assert ApiKeys().name_of(f"{scheme} for-alice".encode()) == "alice"
    assert ApiKeys().name_of(f"{scheme} FOR-ALICE".encode()) is None


@pytest.mark.parametrize("header", ["Basic for-alice", "Bearerfor-alice", "Bearer", "for-alice", " for-alice"])
def test_a_key_without_the_bearer_scheme_is_rejected(file: Path, header: str) -> None:
    assert ApiKeys().name_of(header.encode()) is None


def test_without_a_valid_key_requests_get_401(file: Path) -> None:
    for headers in ({}, {"Authorization": "Bearer for-carol"}, {"Authorization": "for-alice"}):
        answer = client_of().get("/wait?seconds=0", headers=headers)
        assert error(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_anthropics_header_is_accepted(file: Path) -> None:
    for key, status in {"for-alice": 200, "for-carol": 401, "": 401, "Bearer for-alice": 401}.items():
        assert client_of().get("/wait?seconds=0", headers={"x-api-key": key}).status_code == status
    both = {"x-api-key": "for-alice", "Authorization": "Bearer for-carol"}
    assert client_of().get("/wait?seconds=0", headers=both).status_code == 401


def test_health_needs_no_key_and_allows_only_get_and_head(file: Path) -> None:
    for method, status in {"GET": 200, "HEAD": 200, "POST": 405}.items():
        answer = client_of().request(method, "/health")
        assert answer.status_code == status
    assert client_of().head("/wait?seconds=0").status_code == 401


def test_revoked_and_new_keys_take_effect_without_a_restart(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "REFRESH_S", 0.01)

    async def check() -> None:
        keys = ApiKeys()
        refreshing = asyncio.create_task(keys.refresh_forever())
        file.write_text("SERVE_API_KEYS=alice:changed,carol:for-carol\n")
        while keys.name_of(b"Bearer for-alice"):
            await asyncio.sleep(0.01)
        assert keys.name_of(b"Bearer changed") == "alice"
        assert keys.name_of(b"Bearer for-carol") == "carol"
        assert keys.name_of(b"Bearer the-owner") is None
        refreshing.cancel()

    asyncio.run(asyncio.wait_for(check(), 10))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("not a pair", "SERVE_API_KEYS is not NAME:KEY,NAME:KEY"),
        ("owner:other", "entry 1 of SERVE_API_KEYS repeats a name: names must be unique, and owner is taken"),
        ("bob:first, bob:other", "entry 2 of SERVE_API_KEYS repeats a name: names must be unique, and owner is taken"),
        (
            "bob:first, bob : other",
            "entry 2 of SERVE_API_KEYS repeats a name: names must be unique, and owner is taken",
        ),
        ("bob:other, carol: other", "entry 2 of SERVE_API_KEYS repeats a key: each name needs its own key"),
        ("bob:changed", "entry 1 of SERVE_API_KEYS repeats a key: each name needs its own key"),
    ],
)
def test_with_a_malformed_list_the_last_valid_keys_stay_and_no_new_replica_starts(
    file: Path, broken: str, reason: str, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    monkeypatch.setattr(keys_module, "REFRESH_S", 0.01)
    keys = ApiKeys()

    async def reread() -> None:
        refreshing = asyncio.create_task(keys.refresh_forever())
        while reason not in log.getvalue():
            await asyncio.sleep(0.01)
        refreshing.cancel()

    file.write_text(f"SERVE_API_KEY=changed\nSERVE_API_KEYS={broken}\n")
    asyncio.run(asyncio.wait_for(reread(), 10))
    assert keys.name_of(b"Bearer the-owner") == "owner"
    assert keys.name_of(b"Bearer for-alice") == "alice"
    assert keys.name_of(b"Bearer other") is keys.name_of(b"Bearer changed") is None
    with pytest.raises(ValueError, match=reason):
        ApiKeys()


def test_no_replica_starts_without_a_key(file: Path) -> None:
    file.write_text("")
    with pytest.raises(ValueError, match="SERVE_API_KEY did not reach"):
        ApiKeys()


def test_headers_that_are_not_text_do_not_break_the_middleware(file: Path) -> None:
    names = ("x-request-id", "x-session-id", "serve_multiplexed_model_id", "x-request-timeout-seconds", "cookie")
    invalid = [(name.encode(), b"\xff\xfe") for name in names]
    client, key = client_of(), (b"authorization", b"Bearer for-alice")
    assert client.get("/wait?seconds=0", headers=[*invalid, key]).status_code == 200
    assert error(client.get("/absent", headers=[*invalid, key]), 404)["message"] == "Not Found"
    assert error(client.get("/absent", headers=[*invalid, (b"authorization", b"Bearer \xff")]), 401)["message"]


# ---------------------------------------------------------------- limits


def test_a_key_above_its_rate_limit_is_told_when_to_retry(file: Path) -> None:
    client = client_of(per_minute=3)
    assert [client.get("/wait?seconds=0", headers=ALICE).status_code for _ in range(3)] == [200] * 3
    refused = client.get("/wait?seconds=0", headers=ALICE)
    assert error(refused, 429)["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert client.get("/wait?seconds=0", headers=OWNER).status_code == 200  # each key has its own limit


def test_the_rate_limit_is_per_sliding_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter, clock = RateLimiter(per_minute=2, at_once=100), iter([0.0, 30.0, 59.5, 60.0, 60.0, 90.0])
    monkeypatch.setattr("raymill.serving.rate_limits.time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert [limiter.acquire("alice") for _ in range(6)] == [0, 0, 1, 0, 30, 0]


def test_a_key_that_has_used_up_its_tokens_waits_until_enough_are_a_minute_old(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter, clock = RateLimiter(100, 100, tokens_per_minute=10), SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("raymill.serving.rate_limits.time", clock)
    now = 0.0
    assert limiter.acquire("alice") == 0
    limiter.add_tokens("alice", 4)
    now = 20.0
    assert limiter.acquire("alice") == 0
    limiter.add_tokens("alice", 500)  # the request was in progress
    assert limiter.acquire("alice") == 60
    assert limiter.acquire("bob") == 0
    limiter.add_tokens("bob", 9)
    assert limiter.acquire("bob") == 0
    limiter.add_tokens("bob", 1)
    assert limiter.acquire("bob") == 60
    now = 79.5
    assert limiter.acquire("alice") == 1
    now = 80.0
    assert limiter.acquire("alice") == 0
    unlimited = RateLimiter(100, 100)
    unlimited.add_tokens("alice", 10**9)
    assert unlimited.acquire("alice") == 0


def test_responses_have_openais_headers_about_the_limits(file: Path) -> None:
    """The app's engine generates 7 tokens for each request."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        record = accounting.current.get()
        assert record
        record.sequences.append(sequence(3, 4))
        await fake_app()(scope, receive, send)

    client = client_of(app, per_minute=5, tokens_per_minute=20)
    seen = []
    for path in ("/wait?seconds=0", "/absent", "/wait?seconds=0", "/wait?seconds=0"):
        answer = client.get(path, headers=ALICE)
        found = {name.removeprefix("x-ratelimit-"): value for name, value in answer.headers.items() if "rateli" in name}
        assert (found.pop("limit-requests"), found.pop("limit-tokens")) == ("5", "20")
        assert 30 < int(found.pop("reset-requests").removesuffix("s")) <= 60
        resets = int(found.pop("reset-tokens").removesuffix("s"))
        seen.append((answer.status_code, *found.values(), resets > 30))
    assert seen == [(200, "4", "20", False), (404, "3", "13", True), (200, "2", "6", True), (429, "2", "0", True)]
    assert not [name for name in client.get("/wait?seconds=0").headers if "ratelimit" in name]  # without a key
    assert not [name for name in client.get("/health").headers if "ratelimit" in name]
    without = client_of(per_minute=5).get("/wait?seconds=0", headers=ALICE)
    assert sum("ratelimit" in name for name in without.headers) == 3


def test_requests_in_progress_are_limited_per_key() -> None:
    limiter = RateLimiter(per_minute=1000, at_once=2)
    assert [limiter.acquire("alice") for _ in range(3)] == [0, 0, 1]
    assert limiter.acquire("bob") == 0
    limiter.release("alice")
    assert limiter.acquire("alice") == 0


@pytest.mark.parametrize("path", ["/wait?seconds=0", "/fail?status=500", "/fail?status=404", "/absent"])
def test_a_finished_request_frees_its_place_however_it_ends(file: Path, path: str) -> None:
    client = client_of(at_once=1)
    first, second = (client.get(path, headers=ALICE).status_code for _ in range(2))
    assert first == second != 429


# ---------------------------------------------------------------- size and time


def test_a_large_body_is_rejected_with_and_without_content_length(file: Path) -> None:
    client = client_of()
    fits = json.dumps({"a": "x" * (BODY - len('{"a": ""}'))}).encode()
    too_large = fits + b" "
    assert client.post("/echo", content=fits, headers=ALICE).status_code == 200
    assert "larger than 1,000 bytes" in error(client.post("/echo", content=too_large, headers=ALICE), 413)["message"]
    pieces = client.post("/echo", content=iter([too_large[:500], too_large[500:]]), headers=ALICE)
    assert "larger than 1,000 bytes" in error(pieces, 413)["message"]


@pytest.mark.parametrize(
    ("times", "connection"), [(0.5, None), (1.5, None), (MAX_DISCARDED_BODIES, None), (9, "close")]
)
@pytest.mark.parametrize("has_length", [True, False])
def test_a_rejected_body_is_still_read_unless_it_is_far_too_large(
    file: Path, times: float, connection: str | None, has_length: bool
) -> None:
    """A client that is still sending must see the error, and not a broken connection."""

    async def check(key: str, at_once: int, wanted: int) -> None:
        size = int(times * BODY)
        app = ApiMiddleware(fake_app(), ApiKeys(), RequestLimits(100, at_once, BODY, 60))
        length = size if has_length else None
        request = InFlight(app, "/echo", key, b"x", complete=False, length=length)
        for sent in range(1, size):
            request.send_body(b"x", complete=sent == size - 1)
        status, headers, _ = await request.answer()
        assert (status, headers.get("connection")) == (wanted, connection)

    asyncio.run(check("wrong", 9, 401))
    asyncio.run(check("for-alice", 0, 429))
    asyncio.run(check("for-alice", 9, 413 if times > 1 else 400))


def test_a_request_that_takes_too_long_gets_504(file: Path) -> None:
    assert error(client_of(timeout_s=0.2).get("/wait?seconds=9", headers=ALICE), 504)["code"] == "timeout"


def test_a_stream_that_takes_too_long_is_cut_off_without_a_normal_end(file: Path) -> None:
    middleware = ApiMiddleware(fake_app(), ApiKeys(), RequestLimits(100, 100, BODY, timeout_s=0.2))
    sent = []

    async def check() -> None:
        async def send(message: Message) -> None:
            sent.append(message)

        messages: asyncio.Queue[Message] = asyncio.Queue()
        messages.put_nowait({"type": "http.request"})
        header = (b"authorization", b"Bearer for-alice")
        scope = {"type": "http", "method": "GET", "path": "/stream", "query_string": b"seconds=9", "headers": [header]}
        await middleware(scope, messages.get, send)

    with pytest.raises(TimeoutError):
        asyncio.run(check())
    assert [message.get("more_body", True) for message in sent] == [True, True]  # the stream started, but did not end


# ---------------------------------------------------------------- disconnects and timeouts


class InFlight:
    """A request in progress, as Ray's replica runs it. A disconnect sends `http.disconnect`.

    Without HAProxy, Ray then also cancels the task.
    """

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        key: str = "for-alice",
        body: bytes = b"{}",
        *,
        complete: bool = True,
        reads: bool = True,
        length: int | None = None,
    ) -> None:
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
        headers += [(b"content-length", str(length).encode())] if length else []
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self.send_body(body, complete=complete)
        self.sent: list[Message] = []
        self._gone = asyncio.Event()
        self._reads = reads
        self.task = asyncio.create_task(app(scope, self._messages.get, self._send))  # type: ignore[arg-type]

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if not self._reads and message["type"] == "http.response.body":
            await self._gone.wait()

    def send_body(self, body: bytes, *, complete: bool) -> None:
        """Send more of the body."""
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": not complete})

    def disconnect(self, *, cancel: bool = False) -> None:
        self._gone.set()
        self._messages.put_nowait({"type": "http.disconnect"})
        if cancel:
            self.task.cancel()

    async def answer(self) -> tuple[int, dict[str, str], dict]:
        """Return status, headers and body."""
        await self.task
        start, *rest = self.sent
        body = b"".join(message.get("body", b"") for message in rest)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, json.loads(body or b"{}")


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


class FakeEngine:
    """Has handlers like vLLM's, and one that ignores disconnects. Each runs until `free` is set or it is cancelled."""

    def __init__(self) -> None:
        from vllm.entrypoints.serve.utils.api_utils import with_cancellation

        self.running = 0
        self.free = asyncio.Event()
        app = FastAPI()

        @contextlib.contextmanager
        def running() -> Iterator[None]:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1

        @app.post("/complete", response_model=None)
        @with_cancellation
        async def complete(body: dict, raw_request: Request) -> str:
            with running():
                await self.free.wait()
                return "done"

        @app.post("/ignores-disconnect")
        async def ignores_disconnect(body: dict) -> str:
            with running():
                await self.free.wait()
                return "done"

        @app.post("/stream")
        @with_cancellation
        async def stream(body: dict, raw_request: Request) -> StreamingResponse:
            async def pieces() -> AsyncIterator[str]:
                with running():
                    yield "first"
                    await self.free.wait()

            return StreamingResponse(pieces())

        self.app = app


@pytest.fixture(scope="module")
def vllm_loaded() -> None:
    """Import vLLM before a test measures time, because the import is slow on a busy machine."""
    if sys.platform != "linux":
        pytest.skip("vLLM's CPU build exists for Linux only")
    import vllm.entrypoints.serve.utils.api_utils  # noqa: F401


needs_vllm = pytest.mark.usefixtures("vllm_loaded")


@needs_vllm
@pytest.mark.parametrize("path", ["/complete", "/ignores-disconnect", "/stream"])
@pytest.mark.parametrize("how", ["disconnect", "cancel", "timeout"])
def test_a_disconnect_or_timeout_stops_the_work_and_frees_the_slot(file: Path, path: str, how: str) -> None:
    async def check() -> None:
        engine, outcomes = FakeEngine(), list[RequestOutcome]()
        limits = RequestLimits(100, 1, BODY, timeout_s=2 if how == "timeout" else 60, slots=1)
        app = with_middleware(MetricsMiddleware(engine.app, outcomes.append), limits)
        request = InFlight(app, path)
        await wait_until(lambda: engine.running == 1)
        if how != "timeout":
            request.disconnect(cancel=how == "cancel")
        await asyncio.wait({request.task})
        assert engine.running == 0
        assert request.task.cancelled() == (how == "cancel")
        if how != "timeout":
            assert len(request.sent) == (2 if path == "/stream" else 0)
        elif path == "/stream":
            assert isinstance(request.task.exception(), TimeoutError)  # the stream is cut off
        else:
            assert (await request.answer())[0] == 504
        assert [outcome.status for outcome in outcomes] == [200 if path == "/stream" else 499]
        engine.free.set()
        await InFlight(app, path).task
        assert outcomes[1].status == 200

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
def test_requests_that_a_machine_cannot_answer_before_its_end_are_told_so(file: Path) -> None:
    async def check() -> None:
        engine = FakeEngine()
        app = with_middleware(engine.app, RequestLimits(100, 100, BODY, 60, slots=2))
        whole, stream = InFlight(app, "/complete"), InFlight(app, "/stream")
        waiting = InFlight(app, "/complete")  # waits for a slot
        await wait_until(lambda: engine.running == 2 and bool(stream.sent))
        app.end_requests(replica_exit.machine_ends())
        late = InFlight(app, "/complete")
        for request in (whole, waiting, late):
            status, headers, body = await request.answer()
            assert (status, headers["retry-after"], body["error"]["code"]) == (503, "5", "machine_ends")
        await asyncio.wait({stream.task})
        assert isinstance(stream.task.exception(), TimeoutError)  # the stream is cut off
        assert engine.running == 0

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("path", ["/complete", "/ignores-disconnect", "/stream"])
def test_a_disconnect_at_any_moment_stops_the_work(file: Path, path: str, cancel: bool) -> None:
    """The client disconnects after 0 to 59 iterations of the event loop."""

    async def check() -> None:
        engine = FakeEngine()
        app = with_middleware(engine.app, RequestLimits(1000, 1, BODY, 60, slots=1))
        for iterations in range(60):
            request = InFlight(app, path)
            for _ in range(iterations):
                await asyncio.sleep(0)
            request.disconnect(cancel=cancel)
            await asyncio.wait({request.task})
            await wait_until(lambda: engine.running == 0)
        engine.free.set()
        next_one = InFlight(app, path)
        await next_one.task
        assert next_one.sent[0]["status"] == 200

    asyncio.run(asyncio.wait_for(check(), 30))


def test_work_after_the_response_is_not_stopped(file: Path) -> None:
    """The server reports a disconnect after the last part of each response."""

    async def check() -> None:
        app, done = FastAPI(), asyncio.Event()

        async def work() -> None:
            await asyncio.sleep(0.1)
            done.set()

        @app.post("/answer")
        async def answer() -> Response:
            return PlainTextResponse("answer", background=BackgroundTask(work))

        request = InFlight(ApiMiddleware(app, ApiKeys(), RequestLimits(100, 1, BODY, 60)), "/answer")
        await wait_until(lambda: len(request.sent) == 2)
        request.disconnect()
        await request.task
        assert done.is_set()

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
def test_a_stream_stops_when_its_client_does_not_read_and_disconnects(file: Path) -> None:
    """The generator closes at once only if the task is cancelled while the generator waits for the next piece."""

    async def check() -> None:
        engine = FakeEngine()
        app = ApiMiddleware(engine.app, ApiKeys(), RequestLimits(100, 1, BODY, 60))
        request = InFlight(app, "/stream", reads=False)
        await wait_until(lambda: engine.running == 1)
        request.disconnect()
        gc.disable()  # garbage collection could also close the generator
        try:
            await asyncio.wait({request.task})
            await wait_until(lambda: engine.running == 0)
        finally:
            gc.enable()

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
def test_a_disconnect_stops_a_forwarded_request_too(file: Path) -> None:
    """The request goes to a real server, which sees the disconnect as a closed connection."""

    async def check() -> None:
        engine = FakeEngine()
        config = uvicorn.Config(engine.app, port=0, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        await wait_until(lambda: server.started)
        root = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        router = ModelRouter(engine.app, "own", root, lambda: NO_ROUTES._replace(others={"other": ""}))
        request = InFlight(
            ApiMiddleware(router, ApiKeys(), RequestLimits(100, 1, BODY, 60)), "/complete", body=b'{"model": "other"}'
        )
        await wait_until(lambda: engine.running == 1)
        request.disconnect()
        await wait_until(lambda: engine.running == 0)
        server.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(check(), 30))


# ---------------------------------------------------------------- the queue


def test_slow_uploads_only_count_against_their_own_key(file: Path) -> None:
    async def check() -> None:
        app = with_middleware(fake_app(), RequestLimits(100, 2, BODY, 60, body_timeout_s=0.5, slots=1, max_waiting=0))
        slow = [InFlight(app, "/echo", body=b"{", complete=False) for _ in range(2)]
        await asyncio.sleep(0)
        assert (await InFlight(app, "/echo").answer())[0] == 429
        assert (await InFlight(app, "/echo", "for-bob").answer())[0] == 200
        assert (await InFlight(app, "/health", "").answer())[0] == 405  # from the app, which allows only GET and HEAD
        for each in slow:
            status, headers, body = await each.answer()
            assert (status, body["error"]["code"], headers["connection"]) == (408, "timeout", "close")
        assert (await InFlight(app, "/echo").answer())[0] == 200

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
def test_requests_queue_when_all_slots_are_taken_and_get_503_when_the_queue_is_full(file: Path) -> None:
    async def check() -> None:
        engine = FakeEngine()
        app = with_middleware(engine.app, RequestLimits(100, 100, BODY, 60, slots=2, max_waiting=2))
        first = [InFlight(app, "/complete"), InFlight(app, "/ignores-disconnect")]
        await wait_until(lambda: engine.running == 2)
        waiting = [InFlight(app, "/complete", "for-bob"), InFlight(app, "/complete", "for-bob")]
        await asyncio.sleep(0.05)
        status, headers, body = await InFlight(app, "/complete").answer()
        assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "overloaded")
        assert (await InFlight(app, "/health", "").answer())[0] == 404  # answered at once, although the queue is full
        assert engine.running == 2
        waiting[0].disconnect()  # leaves the queue
        await asyncio.wait({waiting[0].task})
        first[0].disconnect()
        await wait_until(lambda: not waiting[1].task.done() and engine.running == 2 and first[0].task.done())
        engine.free.set()
        assert (await waiting[1].answer())[0] == 200

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
def test_time_in_the_queue_counts_towards_the_timeout(file: Path) -> None:
    async def check() -> None:
        engine = FakeEngine()
        app = with_middleware(engine.app, RequestLimits(100, 100, BODY, timeout_s=0.5, slots=1))
        requests = [InFlight(app, "/complete"), InFlight(app, "/complete", "for-bob")]
        assert [(await each.answer())[0] for each in requests] == [504, 504]

    asyncio.run(asyncio.wait_for(check(), 30))


def test_slots_are_granted_in_order_of_arrival() -> None:
    async def check() -> None:
        slots, order = Slots(4, max_waiting=3), list[int]()

        async def acquire(count: int) -> None:
            await slots.acquire(count)
            order.append(count)

        await slots.acquire(3)
        tasks = [asyncio.create_task(acquire(count)) for count in (4, 2, 1)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await slots.acquire(1)  # a slot is free, but other requests came first
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        assert order == []  # the request for 1 slot must wait for the one for 2
        slots.release(3)
        await asyncio.wait(tasks[1:])
        assert order == [2, 1]
        granted = asyncio.create_task(acquire(2))
        await asyncio.sleep(0)
        slots.release(2)
        granted.cancel()  # at the moment when its slots are granted
        with pytest.raises(asyncio.CancelledError):
            await granted
        slots.release(1)
        await asyncio.wait_for(slots.acquire(4), 1)  # no slot is lost

    asyncio.run(check())


def test_the_next_slots_go_to_the_key_with_the_fewest() -> None:
    async def check() -> None:
        slots, order = Slots(4, max_waiting=9), list[str]()

        async def acquire(key: str, count: int = 1) -> None:
            await slots.acquire(count, key)
            order.append(key)

        await slots.acquire(3, "alice")
        await slots.acquire(1, "bob")
        keys = ("alice", "alice", "bob", "carol", "bob")
        tasks = [asyncio.create_task(acquire(key)) for key in keys]
        await asyncio.sleep(0)
        for key in ("alice", "alice", "bob", "carol", "bob"):
            slots.release(1, key)
            await asyncio.sleep(0)
        await asyncio.wait(tasks)
        assert order == ["carol", "alice", "bob", "bob", "alice"]
        large, small = (asyncio.create_task(acquire(key, count)) for key, count in (("alice", 2), ("dave", 1)))
        await asyncio.sleep(0)
        slots.release(1, "alice")
        await asyncio.wait({small})
        assert not large.done()

    asyncio.run(asyncio.wait_for(check(), 30))


@pytest.mark.parametrize("release_first", [True, False])
def test_no_slot_is_lost_when_a_waiting_request_is_cancelled(release_first: bool) -> None:
    """The cancellation and the release happen in the same iteration of the event loop."""

    async def check() -> None:
        slots = Slots(2, max_waiting=9)
        await slots.acquire(2)
        waiting = [asyncio.create_task(slots.acquire(count)) for count in (2, 1)]
        await asyncio.sleep(0)
        if release_first:
            slots.release(2)
        waiting[0].cancel()
        if not release_first:
            slots.release(2)
        assert isinstance((await asyncio.gather(*waiting, return_exceptions=True))[0], asyncio.CancelledError)
        slots.release(1)
        await asyncio.wait_for(slots.acquire(2), 1)

    asyncio.run(check())


def test_a_forwarded_request_takes_no_slot(file: Path) -> None:
    async def check() -> None:
        arrived = asyncio.Event()

        class Forwarder:
            """Forwards requests for `other` to a model that never answers."""

            def __init__(self, app: ASGIApp) -> None:
                self.app = app

            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                if scope["state"]["body"].model != "other":
                    await self.app(scope, receive, send)
                else:
                    arrived.set()
                    await asyncio.Event().wait()

        limits = RequestLimits(100, 100, BODY, 60, slots=1, max_waiting=0)
        app = ApiMiddleware(Forwarder(QueueMiddleware(fake_app(), limits)), ApiKeys(), limits)
        request = InFlight(app, "/echo", body=b'{"model": "other"}')
        await arrived.wait()
        assert (await InFlight(app, "/echo", "for-bob").answer())[0] == 200
        request.disconnect()

    asyncio.run(asyncio.wait_for(check(), 30))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": ["a"] * 4, "n": 2}, 200),
        ({"prompt": ["a"] * 9}, 400),
        ({"prompt": ["a"] * 3, "n": 3}, 400),
        ({"prompt": "a", "n": 8}, 200),
    ],
)
def test_prompts_times_n_is_limited(file: Path, body: dict, status: int) -> None:
    limits = RequestLimits(100, 100, BODY, 5, max_sequences=8)
    answer = TestClient(ApiMiddleware(fake_app(), ApiKeys(), limits)).post("/echo", json=body, headers=ALICE)
    assert answer.status_code == status
    if status == 400:
        assert error(answer, 400)["code"] == "too_many_sequences"
        assert "9, more than 8" in answer.text


def test_the_rate_limit_counts_sequences(file: Path) -> None:
    eight = {"prompt": ["a"] * 4, "n": 2}
    client = client_of(per_minute=20)
    assert [client.post("/echo", json=eight, headers=ALICE).status_code for _ in range(3)] == [200, 200, 429]
    assert client.post("/echo", json=eight, headers=OWNER).status_code == 200
    client = client_of(at_once=7)
    assert client.post("/echo", json=eight, headers=ALICE).status_code == 429
    assert client.post("/echo", json={"prompt": "a", "n": 7}, headers=ALICE).status_code == 200


# ---------------------------------------------------------------- a dead engine


def test_a_dead_engine_gets_503_with_a_time_to_retry(file: Path) -> None:
    alive = [True, False]
    before_work = TestClient(with_middleware(fake_app(), RequestLimits(100, 100, BODY, 5), lambda: alive.pop(0)))
    during_work = TestClient(
        with_middleware(fake_app(), RequestLimits(100, 100, BODY, 5), lambda: False), raise_server_exceptions=False
    )
    assert before_work.post("/echo", json={}, headers=ALICE).status_code == 200
    for answer in (
        before_work.post("/echo", json={}, headers=ALICE),
        during_work.get("/fail?status=500", headers=ALICE),
    ):
        assert error(answer, 503)["code"] == "engine_dead"
        assert int(answer.headers["retry-after"]) >= 1


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/fail?status=400", 400, "in plain text"),
        ("/fail?status=404", 404, "in words"),
        ("/fail?status=500", 500, "the server failed to process this request; see its log"),
        ("/fail?status=503", 503, "in words"),
        ("/absent", 404, "Not Found"),
    ],
)
def test_every_error_has_openais_format_and_hides_internals(file: Path, path: str, status: int, message: str) -> None:
    assert error(client_of().get(path, headers=ALICE), status)["message"] == message


@pytest.mark.parametrize(
    ("headers", "body", "status", "kind"),
    [
        ({}, b"{}", 401, "authentication_error"),
        (ALICE, b"[]", 400, "invalid_request_error"),
        (ALICE, b"{}", 404, "not_found_error"),
        (ALICE, b"x" * (BODY + 1), 413, "request_too_large"),
        (ALICE | {"x-fail": "500"}, b"{}", 500, "api_error"),
        (ALICE | {"x-fail": "503"}, b"{}", 503, "overloaded_error"),
    ],
)
def test_errors_of_the_messages_api_have_anthropics_format(
    file: Path, headers: dict, body: bytes, status: int, kind: str
) -> None:
    app = FastAPI()

    @app.post("/v1/messages")
    async def messages(request: Request) -> None:
        raise HTTPException(int(request.headers.get("x-fail", "404")), "in words")

    answer = client_of(app).post("/v1/messages", headers=headers, content=body)
    assert answer.status_code == status
    found = answer.json()
    assert (set(found), found["type"], found["error"]["type"]) == ({"type", "error"}, "error", kind)
    assert set(found["error"]) == {"type", "message"}


def test_an_error_in_openais_format_keeps_its_code(file: Path) -> None:
    shaped = error(client_of().get("/fail?status=409", headers=ALICE), 409)
    assert (shaped["message"], shaped["param"], shaped["code"]) == ("shaped", "n", "too_many")
    # vLLM sets `code` to the HTTP status, which adds nothing
    assert error(client_of().get("/fail?status=422", headers=ALICE), 422)["code"] is None


@pytest.mark.parametrize(
    ("message", "start"),
    [
        (
            "This model's maximum context length is 256 tokens. However, you requested 4. (parameter=a, value=[1])",
            "This model's maximum context length is 256 tokens. However, you requested 4.",
        ),
        ("Input length (300) exceeds model's maximum context length (256).", "Input length (300)"),
        (
            "max_tokens=1000 cannot be greater than max_model_len=max_total_tokens=256. (parameter=a, value=1)",
            "max_tokens=1000 cannot be greater than max_model_len=256.",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_request_that_is_too_long_has_the_code_that_clients_know(
    file: Path, path: str, message: str, start: str
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        vllms = {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}
        await JSONResponse({"error": vllms}, 400)(scope, receive, send)

    answer = client_of(app).post(path, json={}, headers=ALICE)
    if path == "/v1/messages":
        assert answer.json()["error"]["message"].startswith(f"prompt is too long: {start}")
    else:
        assert error(answer, 400)["code"] == "context_length_exceeded"
        assert error(answer, 400)["message"].startswith(start)
    assert "value=" not in answer.text


def test_streams_pass_through_proxies_at_once(file: Path) -> None:
    app = FastAPI()

    @app.get("/events")
    async def events(cached: str = "") -> StreamingResponse:
        headers = {"Cache-Control": cached} if cached else {}
        return StreamingResponse(iter(["data: 1\n\n"]), media_type="text/event-stream", headers=headers)

    stream = client_of(app).get("/events", headers=ALICE)
    assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert client_of(app).get("/events?cached=no-store", headers=ALICE).headers["cache-control"] == "no-store"
    assert "cache-control" not in client_of().get("/wait?seconds=0", headers=ALICE).headers


def test_every_route_for_get_answers_head(file: Path) -> None:
    """OpenAI's clients do not need this, but tools that check whether a server is up do."""
    for path, status in {"/wait?seconds=0": 200, "/health": 200, "/absent": 404, "/echo": 405}.items():
        assert client_of().head(path, headers=ALICE).status_code == status
    assert client_of().head("/wait?seconds=0").status_code == 401


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "deflate, gzip", "x" * 5000])
def test_a_compressed_body_is_refused_by_name(file: Path, encoding: str) -> None:
    sent = {**ALICE, "Content-Encoding": encoding}
    answer = client_of().post("/echo", content=gzip.compress(b"{}"), headers=sent)
    assert error(answer, 415)["code"] == "unsupported_encoding"
    assert f"`Content-Encoding: {encoding[:200]}`" in answer.json()["error"]["message"]
    for plain in ("identity", "Identity", ""):
        assert client_of().post("/echo", json={}, headers={**ALICE, "Content-Encoding": plain}).status_code == 200


def test_a_message_with_a_lone_surrogate_can_be_sent(file: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raw = json.dumps({"error": {"message": "half a pair: \ud83d", "param": "\udfff"}}).encode()
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": raw})

    assert error(client_of(app).get("/", headers=ALICE), 400)["message"] == "half a pair: \ud83d"


@pytest.mark.parametrize("raw", [b"[" * 900, b'{"stop": "\\ud83d"}', b"no JSON"])
def test_an_invalid_body_never_reaches_the_app(file: Path, raw: bytes) -> None:
    assert error(client_of().post("/echo", content=raw, headers=ALICE), 400)["code"]


# ---------------------------------------------------------------- overhead


@pytest.mark.parametrize("name", ["absent", "x" * 300, "x" * 900, "../tiny", "tiny\0", "TINY", "sql@1", "\n"])
def test_an_unknown_model_never_reaches_the_app(file: Path, name: str) -> None:
    """vLLM would keep a lock for each name, and look for its files."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"]["body"].model)
        await Response()(scope, receive, send)

    client = client_of(KnownModels(app, lambda: ["tiny", "sql"], {"broken": "it has no weights"}))
    answer = client.post("/v1/completions", json={"model": name}, headers=OWNER)
    found = error(answer, 404)
    assert found["message"] == f"model `{name[:200]}` does not exist; list the models with GET /v1/models"
    assert found["param"] == "model"
    found = error(client.post("/v1/completions", json={"model": "broken"}, headers=OWNER), 400)
    assert found["message"] == "the adapter of broken cannot be used: it has no weights"
    assert seen == []
    for known in ("tiny", "sql", "", None):
        assert client.post("/v1/completions", json={"model": known}, headers=OWNER).status_code == 200
    assert seen == ["tiny", "sql", "", ""]


def test_the_middleware_costs_less_than_200_microseconds_a_request(file: Path, tmp_path: Path) -> None:
    """The cost includes the count of tokens, the limits and the access log."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if record := accounting.current.get():
            record.sequences.append(generated)
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        pass

    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "some words " * 90}]}).encode()
    headers = [(b"authorization", b"Bearer for-bob")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    generated = sequence(9, 4)
    limits = RequestLimits(10**6, 100, BODY, 60, tokens_per_minute=10**9)
    middleware = ApiMiddleware(app, ApiKeys(), limits, on_end=AccessLog(tmp_path).write)

    async def seconds(called: ASGIApp, count: int = 2000) -> float:
        started = time.thread_time()  # CPU time of this thread, so that a busy machine does not matter
        for _ in range(count):
            await called(scope, receive, send)
        return (time.thread_time() - started) / count

    cost = min(asyncio.run(seconds(middleware)) - asyncio.run(seconds(app)) for _ in range(5))
    assert cost < 200e-6


# ------------------------------------------------------------------------------------------ the user's own functions


def test_a_request_that_a_check_rejects_or_could_not_check_does_not_reach_the_model(
    file: Path, log: io.StringIO
) -> None:
    async def refuse(request: ApiRequest) -> None:
        if request.body["max_tokens"] > 5:
            raise ApiError(403, f"too many for {request.key} at {request.route}", code="own")

    def fail(request: ApiRequest) -> None:
        _ = request.body["temperature"]

    calls: list[str] = []
    app, limits = fake_app(), RequestLimits(100, 100, BODY, 5)

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(scope["path"])
        await app(scope, receive, send)

    client = TestClient(ApiMiddleware(counting, ApiKeys(), limits, checks=[refuse, fail]))
    refused = client.post("/echo", json={"max_tokens": 6}, headers=ALICE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "own")
    assert refused.json()["error"]["message"] == "too many for alice at POST /echo"
    failed = client.post("/echo", json={"max_tokens": 5}, headers=ALICE)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "check_failed")
    assert "temperature" not in failed.text, "the client must not see the server's code"
    assert "the check fail failed" in log.getvalue()
    assert calls == []
    assert client.post("/echo", json={"max_tokens": 5, "temperature": 1}, headers=ALICE).status_code == 200
    assert calls == ["/echo"]


def test_a_logger_that_fails_does_not_keep_the_record_from_the_next(log: io.StringIO) -> None:
    got: list[RequestRecord] = []

    def fail(record: RequestRecord) -> None:
        raise OSError("no space")

    record = RequestRecord("GET /")
    hooks.record(record, [fail, got.append])
    assert got == [record]
    assert "the logger fail failed" in log.getvalue()
