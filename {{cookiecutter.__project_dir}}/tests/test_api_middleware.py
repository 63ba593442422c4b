"""What stands before a served model: keys, limits, sizes, time, errors in OpenAI's shape; and what all that costs."""

import asyncio
import contextlib
import gc
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.serving import keys as keys_module
from pipeline.serving.api_middleware import DISCARDED, ApiMiddleware, Queued, RequestLimits
from pipeline.serving.canary import NOWHERE, RequestOutcome
from pipeline.serving.keys import Keys
from pipeline.serving.limits import Limits, QueueFull, Slots
from pipeline.serving.model_router import MetricsMiddleware, ModelRouter

BODY = 1000
OWNER = {"Authorization": "Bearer the-owner"}
ALICE = {"Authorization": "Bearer for-alice"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the keys are."""
    file = tmp_path / ".env"
    file.write_text("SERVE_API_KEY=the-owner\nSERVE_API_KEYS=alice:for-alice, bob:for-bob\n")
    monkeypatch.setenv("SECRETS_FILE", str(file))
    monkeypatch.delenv("SECRETS_PREFIX", raising=False)
    return file


def engine() -> FastAPI:
    """An app that does to a door what vLLM's does."""
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


def door(app: ASGIApp | None = None, *, per_minute: int = 100, at_once: int = 100, timeout_s: float = 5) -> TestClient:
    closed = ApiMiddleware(app or engine(), Keys(), RequestLimits(per_minute, at_once, BODY, timeout_s))
    return TestClient(closed, raise_server_exceptions=False)


def guarded(app: ASGIApp, rules: RequestLimits, alive: Callable[[], bool] = lambda: True) -> ApiMiddleware:
    """A model's app behind all of its middleware."""
    return ApiMiddleware(Queued(app, rules, alive), Keys(), rules, alive)


def error(answer: httpx2.Response, status: int) -> dict:
    """The error of an answer, which must have OpenAI's shape and this status."""
    assert answer.status_code == status
    found = answer.json()
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return found["error"]


# ---------------------------------------------------------------- keys


def test_each_key_opens_and_has_its_name(file: Path) -> None:
    keys = Keys()
    found = [keys.name_of(f"Bearer {key}".encode()) for key in ("the-owner", "for-alice", "for-bob", "for-carol", "")]
    assert found == ["owner", "alice", "bob", None, None]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_scheme_is_taken_in_any_case(file: Path, scheme: str) -> None:
    assert Keys().name_of(f"{scheme} for-alice".encode()) == "alice"
    assert Keys().name_of(f"{scheme} FOR-ALICE".encode()) is None


@pytest.mark.parametrize("header", ["Basic for-alice", "Bearerfor-alice", "Bearer", "for-alice", " for-alice"])
def test_a_key_without_its_scheme_opens_nothing(file: Path, header: str) -> None:
    assert Keys().name_of(header.encode()) is None


def test_without_a_key_nothing_opens(file: Path) -> None:
    for headers in ({}, {"Authorization": "Bearer for-carol"}, {"Authorization": "for-alice"}):
        answer = door().get("/wait?seconds=0", headers=headers)
        assert error(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_health_is_open_to_get_and_head_alone(file: Path) -> None:
    for method, status in {"GET": 200, "HEAD": 200, "POST": 405}.items():
        answer = door().request(method, "/health")
        assert answer.status_code == status
    assert door().head("/wait?seconds=0").status_code == 401


def test_a_key_that_is_taken_off_closes_and_a_new_one_opens(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "REFRESH_S", 0.01)

    async def renamed() -> None:
        keys = Keys()
        keeping_up = asyncio.create_task(keys.keep_up())
        file.write_text("SERVE_API_KEYS=alice:changed,carol:for-carol\n")
        while keys.name_of(b"Bearer for-alice"):
            await asyncio.sleep(0.01)
        assert keys.name_of(b"Bearer changed") == "alice"
        assert keys.name_of(b"Bearer for-carol") == "carol"
        assert keys.name_of(b"Bearer the-owner") is None
        keeping_up.cancel()

    asyncio.run(asyncio.wait_for(renamed(), 10))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("not a pair", "SERVE_API_KEYS is not NAME:KEY,NAME:KEY"),
        ("owner:other", "entry 1 of SERVE_API_KEYS repeats a name: each key needs its own, not owner"),
        ("bob:first, bob:other", "entry 2 of SERVE_API_KEYS repeats a name: each key needs its own, not owner"),
        ("bob:first, bob : other", "entry 2 of SERVE_API_KEYS repeats a name: each key needs its own, not owner"),
        ("bob:other, carol: other", "entry 2 of SERVE_API_KEYS repeats a key: each name needs its own"),
        ("bob:changed", "entry 1 of SERVE_API_KEYS repeats a key: each name needs its own"),
    ],
)
def test_with_a_broken_list_the_last_good_one_stays_and_no_replica_starts(
    file: Path, broken: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keys_module, "REFRESH_S", 0.01)
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)
    keys = Keys()

    async def reread() -> None:
        keeping_up = asyncio.create_task(keys.keep_up())
        while reason not in caplog.text:
            await asyncio.sleep(0.01)
        keeping_up.cancel()

    file.write_text(f"SERVE_API_KEY=changed\nSERVE_API_KEYS={broken}\n")
    asyncio.run(asyncio.wait_for(reread(), 10))
    assert keys.name_of(b"Bearer the-owner") == "owner"
    assert keys.name_of(b"Bearer for-alice") == "alice"
    assert keys.name_of(b"Bearer other") is keys.name_of(b"Bearer changed") is None
    with pytest.raises(ValueError, match=reason):
        Keys()


def test_no_replica_starts_without_a_key(file: Path) -> None:
    file.write_text("")
    with pytest.raises(ValueError, match="SERVE_API_KEY did not reach"):
        Keys()


def test_bytes_that_are_no_text_in_headers_are_answered(file: Path) -> None:
    names = ("x-request-id", "x-session-id", "serve_multiplexed_model_id", "x-request-timeout-seconds", "cookie")
    wild = [(name.encode(), b"\xff\xfe") for name in names]
    client, key = door(), (b"authorization", b"Bearer for-alice")
    assert client.get("/wait?seconds=0", headers=[*wild, key]).status_code == 200
    assert error(client.get("/absent", headers=[*wild, key]), 404)["message"] == "Not Found"
    assert error(client.get("/absent", headers=[*wild, (b"authorization", b"Bearer \xff")]), 401)["message"]


# ---------------------------------------------------------------- limits


def test_more_in_a_minute_than_a_key_may_is_told_when_to_come_back(file: Path) -> None:
    client = door(per_minute=3)
    assert [client.get("/wait?seconds=0", headers=ALICE).status_code for _ in range(3)] == [200] * 3
    refused = client.get("/wait?seconds=0", headers=ALICE)
    assert error(refused, 429)["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert client.get("/wait?seconds=0", headers=OWNER).status_code == 200  # another key has its own


def test_a_minute_later_a_key_may_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, clock = Limits(per_minute=2, at_once=100), iter([0.0, 30.0, 59.5, 60.0, 60.0, 90.0])
    monkeypatch.setattr("pipeline.serving.limits.time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert [limits.begin("alice") for _ in range(6)] == [0, 0, 1, 0, 30, 0]


def test_more_at_once_than_a_key_may_is_refused_and_ends_are_counted() -> None:
    limits = Limits(per_minute=1000, at_once=2)
    assert [limits.begin("alice") for _ in range(3)] == [0, 0, 1]
    assert limits.begin("bob") == 0
    limits.end("alice")
    assert limits.begin("alice") == 0


@pytest.mark.parametrize("path", ["/wait?seconds=0", "/fail?status=500", "/fail?status=404", "/absent"])
def test_a_request_is_over_however_it_ends(file: Path, path: str) -> None:
    client = door(at_once=1)
    first, second = (client.get(path, headers=ALICE).status_code for _ in range(2))
    assert first == second != 429


# ---------------------------------------------------------------- size and time


def test_a_large_request_is_refused_with_and_without_its_length(file: Path) -> None:
    client = door()
    fits = json.dumps({"a": "x" * (BODY - len('{"a": ""}'))}).encode()
    too_large = fits + b" "
    assert client.post("/echo", content=fits, headers=ALICE).status_code == 200
    assert "larger than 1,000 bytes" in error(client.post("/echo", content=too_large, headers=ALICE), 413)["message"]
    pieces = client.post("/echo", content=iter([too_large[:500], too_large[500:]]), headers=ALICE)
    assert "larger than 1,000 bytes" in error(pieces, 413)["message"]


@pytest.mark.parametrize(("times", "connection"), [(0.5, None), (1.5, None), (DISCARDED, None), (9, "close")])
@pytest.mark.parametrize("has_length", [True, False])
def test_a_rejected_body_is_read_unless_it_is_far_too_large(
    file: Path, times: float, connection: str | None, has_length: bool
) -> None:
    """A client that still sends would see its connection break in place of the answer."""

    async def check(key: str, at_once: int, wanted: int) -> None:
        size = int(times * BODY)
        asking = Asking(
            ApiMiddleware(engine(), Keys(), RequestLimits(100, at_once, BODY, 60)), "/echo", key, b"x", whole=False,
            length=size if has_length else None,
        )  # fmt: skip
        for sent in range(1, size):
            asking.go_on(b"x", whole=sent == size - 1)
        status, headers, _ = await asking.answer()
        assert (status, headers.get("connection")) == (wanted, connection)

    asyncio.run(check("wrong", 9, 401))
    asyncio.run(check("for-alice", 0, 429))
    asyncio.run(check("for-alice", 9, 413 if times > 1 else 400))


def test_an_answer_that_takes_too_long_is_ended(file: Path) -> None:
    assert error(door(timeout_s=0.2).get("/wait?seconds=9", headers=ALICE), 504)["code"] == "timeout"


def test_a_stream_that_takes_too_long_is_cut_off_and_not_ended(file: Path) -> None:
    closed = ApiMiddleware(engine(), Keys(), RequestLimits(100, 100, BODY, timeout_s=0.2))
    sent = []

    async def cut() -> None:
        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request"}

        header = (b"authorization", b"Bearer for-alice")
        scope = {"type": "http", "method": "GET", "path": "/stream", "query_string": b"seconds=9", "headers": [header]}
        await closed(scope, receive, send)

    with pytest.raises(TimeoutError):
        asyncio.run(cut())
    assert [message.get("more_body", True) for message in sent] == [True, True]  # started, and never ended


# ---------------------------------------------------------------- work that nobody waits for


class Asking:
    """A request as Ray's replica passes it on. A disconnect sends `http.disconnect` and cancels the task."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        key: str = "for-alice",
        body: bytes = b"{}",
        *,
        whole: bool = True,
        reads: bool = True,
        length: int | None = None,
    ) -> None:
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
        headers += [(b"content-length", str(length).encode())] if length else []
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self.go_on(body, whole=whole)
        self.sent: list[Message] = []
        self._gone = asyncio.Event()
        self._reads = reads
        self.task = asyncio.create_task(app(scope, self._messages.get, self._send))  # type: ignore[arg-type]

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if not self._reads and message["type"] == "http.response.body":
            await self._gone.wait()

    def go_on(self, body: bytes, *, whole: bool) -> None:
        """Send more of the body."""
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": not whole})

    def hang_up(self) -> None:
        self._gone.set()
        self._messages.put_nowait({"type": "http.disconnect"})
        self.task.cancel()

    async def answer(self) -> tuple[int, dict[str, str], dict]:
        """Status, headers and body."""
        await self.task
        start, *rest = self.sent
        body = b"".join(message.get("body", b"") for message in rest)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, json.loads(body or b"{}")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


class Engine:
    """Handlers that work until they are stopped, one for each way in which an app can run them."""

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

        @app.post("/whole", response_model=None)
        @with_cancellation
        async def whole(body: dict, raw_request: Request) -> str:
            with running():
                await self.free.wait()
                return "done"

        @app.post("/deaf")
        async def deaf(body: dict) -> str:
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
    """Import vLLM before a test measures time: on a busy machine the import is slow."""
    if sys.platform != "linux":
        pytest.skip("vLLM's CPU build exists for Linux only")
    import vllm.entrypoints.serve.utils.api_utils  # noqa: F401


needs_vllm = pytest.mark.usefixtures("vllm_loaded")


@needs_vllm
@pytest.mark.parametrize("path", ["/whole", "/deaf", "/stream"])
@pytest.mark.parametrize("how", ["hangs up", "time is up"])
def test_work_ends_and_its_place_is_free_when_nobody_waits_for_it(file: Path, path: str, how: str) -> None:
    async def check() -> None:
        engine, records = Engine(), list[RequestOutcome]()
        rules = RequestLimits(100, 1, BODY, timeout_s=2 if how == "time is up" else 60, slots=1)
        door = guarded(MetricsMiddleware(engine.app, records.append), rules)
        asking = Asking(door, path)
        await until(lambda: engine.running == 1)
        if how == "hangs up":
            asking.hang_up()
        await asyncio.wait({asking.task})
        assert engine.running == 0
        if how == "hangs up":
            assert asking.task.cancelled()
        elif path == "/stream":
            assert isinstance(asking.task.exception(), TimeoutError)  # cut off
        else:
            assert (await asking.answer())[0] == 504
        assert [record.status for record in records] == [200 if path == "/stream" else 499]
        engine.free.set()
        await Asking(door, path).task
        assert records[1].status == 200

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
@pytest.mark.parametrize("path", ["/whole", "/deaf", "/stream"])
def test_it_ends_whenever_the_client_hangs_up(file: Path, path: str) -> None:
    """Hang up after every possible number of event-loop iterations."""

    async def check() -> None:
        engine = Engine()
        door = guarded(engine.app, RequestLimits(1000, 1, BODY, 60, slots=1))
        for turns in range(60):
            asking = Asking(door, path)
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.hang_up()
            await asyncio.wait({asking.task})
            await until(lambda: engine.running == 0)
        engine.free.set()
        next_one = Asking(door, path)
        await next_one.task
        assert next_one.sent[0]["status"] == 200

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
def test_a_stream_ends_whose_client_does_not_read_and_hangs_up(file: Path) -> None:
    """The stream is cancelled while it waits for its next piece, so that the generator is closed."""

    async def check() -> None:
        engine = Engine()
        door = ApiMiddleware(engine.app, Keys(), RequestLimits(100, 1, BODY, 60))
        asking = Asking(door, "/stream", reads=False)
        await until(lambda: engine.running == 1)
        asking.hang_up()
        gc.disable()  # nearly so in production: a replica calls gc.freeze when it starts
        try:
            await asyncio.wait({asking.task})
            await until(lambda: engine.running == 0)
        finally:
            gc.enable()

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
def test_a_request_that_was_handed_on_ends_where_it_went(file: Path) -> None:
    """Forward to a real server, which sees a disconnect as a closed connection."""

    async def check() -> None:
        engine = Engine()
        config = uvicorn.Config(engine.app, port=0, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        root = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        fork = ModelRouter(engine.app, "own", root, lambda: NOWHERE._replace(others={"other": ""}))
        asking = Asking(
            ApiMiddleware(fork, Keys(), RequestLimits(100, 1, BODY, 60)), "/whole", body=b'{"model": "other"}'
        )
        await until(lambda: engine.running == 1)
        asking.hang_up()
        await until(lambda: engine.running == 0)
        server.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(check(), 30))


# ---------------------------------------------------------------- one busy client among others


def test_bodies_that_do_not_come_hold_their_own_keys_place_alone(file: Path) -> None:
    async def check() -> None:
        door = guarded(engine(), RequestLimits(100, 2, BODY, 60, body_timeout_s=0.5, slots=1, max_waiting=0))
        slow = [Asking(door, "/echo", body=b"{", whole=False) for _ in range(2)]
        await asyncio.sleep(0)
        assert (await Asking(door, "/echo").answer())[0] == 429
        assert (await Asking(door, "/echo", "for-bob").answer())[0] == 200
        assert (await Asking(door, "/health", "").answer())[0] == 405  # reaches the app, which allows only GET and HEAD
        for each in slow:
            status, headers, body = await each.answer()
            assert (status, body["error"]["code"], headers["connection"]) == (408, "timeout", "close")
        assert (await Asking(door, "/echo").answer())[0] == 200

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
def test_more_than_the_replica_works_on_waits_and_more_than_may_wait_is_told_to_come_back(file: Path) -> None:
    async def check() -> None:
        engine = Engine()
        door = guarded(engine.app, RequestLimits(100, 100, BODY, 60, slots=2, max_waiting=2))
        first = [Asking(door, "/whole"), Asking(door, "/deaf")]
        await until(lambda: engine.running == 2)
        waiting = [Asking(door, "/whole", "for-bob"), Asking(door, "/whole", "for-bob")]
        await asyncio.sleep(0.05)
        status, headers, body = await Asking(door, "/whole").answer()
        assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "overloaded")
        assert (await Asking(door, "/health", "").answer())[0] == 404  # not queued
        assert engine.running == 2
        waiting[0].hang_up()  # leaves the queue
        await asyncio.wait({waiting[0].task})
        first[0].hang_up()
        await until(lambda: not waiting[1].task.done() and engine.running == 2 and first[0].task.done())
        engine.free.set()
        assert (await waiting[1].answer())[0] == 200

    asyncio.run(asyncio.wait_for(check(), 30))


@needs_vllm
def test_time_in_the_queue_counts(file: Path) -> None:
    async def check() -> None:
        engine = Engine()
        door = guarded(engine.app, RequestLimits(100, 100, BODY, timeout_s=0.5, slots=1))
        asking = [Asking(door, "/whole"), Asking(door, "/whole", "for-bob")]
        assert [(await each.answer())[0] for each in asking] == [504, 504]

    asyncio.run(asyncio.wait_for(check(), 30))


def test_room_goes_to_those_who_came_first() -> None:
    async def check() -> None:
        slots, order = Slots(4, max_waiting=3), list[int]()

        async def take(count: int) -> None:
            await slots.take(count)
            order.append(count)

        await slots.take(3)
        asking = [asyncio.create_task(take(count)) for count in (4, 2, 1)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await slots.take(1)  # a slot is free, but others came first
        asking[0].cancel()
        await asyncio.sleep(0.01)
        assert order == []  # 2 came before 1
        slots.give(3)
        await asyncio.wait(asking[1:])
        assert order == [2, 1]
        granted = asyncio.create_task(take(2))
        await asyncio.sleep(0)
        slots.give(2)
        granted.cancel()  # at the moment in which its turn came
        with pytest.raises(asyncio.CancelledError):
            await granted
        slots.give(1)
        await asyncio.wait_for(slots.take(4), 1)  # nothing is lost

    asyncio.run(check())


@pytest.mark.parametrize("gives_first", [True, False])
def test_no_room_is_lost_when_one_who_waits_is_cancelled(gives_first: bool) -> None:
    """By whatever else happens in the same iteration of the event loop."""

    async def check() -> None:
        slots = Slots(2, max_waiting=9)
        await slots.take(2)
        waiting = [asyncio.create_task(slots.take(count)) for count in (2, 1)]
        await asyncio.sleep(0)
        if gives_first:
            slots.give(2)
        waiting[0].cancel()
        if not gives_first:
            slots.give(2)
        assert isinstance((await asyncio.gather(*waiting, return_exceptions=True))[0], asyncio.CancelledError)
        slots.give(1)
        await asyncio.wait_for(slots.take(2), 1)

    asyncio.run(check())


def test_a_request_that_is_handed_on_takes_no_room_here(file: Path) -> None:
    async def check() -> None:
        arrived = asyncio.Event()

        class Elsewhere:
            """Hands requests on to a model that never answers, unless they are for this one."""

            def __init__(self, app: ASGIApp) -> None:
                self.app = app

            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                if scope["state"]["body"].model != "other":
                    await self.app(scope, receive, send)
                else:
                    arrived.set()
                    await asyncio.Event().wait()

        rules = RequestLimits(100, 100, BODY, 60, slots=1, max_waiting=0)
        door = ApiMiddleware(Elsewhere(Queued(engine(), rules)), Keys(), rules)
        asking = Asking(door, "/echo", body=b'{"model": "other"}')
        await arrived.wait()
        assert (await Asking(door, "/echo", "for-bob").answer())[0] == 200
        asking.hang_up()

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
def test_prompts_times_answers_are_capped(file: Path, body: dict, status: int) -> None:
    rules = RequestLimits(100, 100, BODY, 5, max_sequences=8)
    answer = TestClient(ApiMiddleware(engine(), Keys(), rules)).post("/echo", json=body, headers=ALICE)
    assert answer.status_code == status
    if status == 400:
        assert error(answer, 400)["code"] == "too_many_sequences"
        assert "9, more than 8" in answer.text


def test_a_request_counts_as_often_as_it_has_sequences(file: Path) -> None:
    eight = {"prompt": ["a"] * 4, "n": 2}
    client = door(per_minute=20)
    assert [client.post("/echo", json=eight, headers=ALICE).status_code for _ in range(3)] == [200, 200, 429]
    assert client.post("/echo", json=eight, headers=OWNER).status_code == 200
    client = door(at_once=7)
    assert client.post("/echo", json=eight, headers=ALICE).status_code == 429
    assert client.post("/echo", json={"prompt": "a", "n": 7}, headers=ALICE).status_code == 200


# ---------------------------------------------------------------- an engine that is dead


def test_while_an_engine_is_dead_a_client_is_told_to_come_back(file: Path) -> None:
    alive = [True, False]
    refused = TestClient(guarded(engine(), RequestLimits(100, 100, BODY, 5), lambda: alive.pop(0)))
    failed = TestClient(
        guarded(engine(), RequestLimits(100, 100, BODY, 5), lambda: False), raise_server_exceptions=False
    )
    assert refused.post("/echo", json={}, headers=ALICE).status_code == 200
    for answer in (refused.post("/echo", json={}, headers=ALICE), failed.get("/fail?status=500", headers=ALICE)):
        assert error(answer, 503)["code"] == "engine_dead"
        assert int(answer.headers["retry-after"]) >= 1


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/fail?status=400", 400, "in plain text"),
        ("/fail?status=404", 404, "in words"),
        ("/fail?status=500", 500, "the server failed on this request; its log has the reason"),
        ("/fail?status=503", 503, "in words"),
        ("/absent", 404, "Not Found"),
    ],
)
def test_every_error_has_openais_shape_and_tells_nothing_of_the_inside(
    file: Path, path: str, status: int, message: str
) -> None:
    assert error(door().get(path, headers=ALICE), status)["message"] == message


def test_an_error_that_has_openais_shape_keeps_its_code(file: Path) -> None:
    shaped = error(door().get("/fail?status=409", headers=ALICE), 409)
    assert (shaped["message"], shaped["param"], shaped["code"]) == ("shaped", "n", "too_many")
    assert error(door().get("/fail?status=422", headers=ALICE), 422)["code"] is None  # vLLM's repeats the status


def test_a_message_that_is_no_text_can_be_sent(file: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raw = json.dumps({"error": {"message": "half a pair: \ud83d", "param": "\udfff"}}).encode()
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": raw})

    assert error(door(app).get("/", headers=ALICE), 400)["message"] == "half a pair: \ud83d"


@pytest.mark.parametrize("raw", [b"[" * 900, b'{"stop": "\\ud83d"}', b"no JSON"])
def test_a_body_that_nothing_should_read_never_reaches_the_app(file: Path, raw: bytes) -> None:
    assert error(door().post("/echo", content=raw, headers=ALICE), 400)["code"]


# ---------------------------------------------------------------- what it costs


def test_the_door_costs_less_than_200_microseconds_a_request(file: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
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
    closed = ApiMiddleware(app, Keys(), RequestLimits(10**6, 100, BODY, 60))

    async def seconds(called: ASGIApp, count: int = 2000) -> float:
        started = time.thread_time()  # CPU time of this thread, so that a busy machine does not matter
        for _ in range(count):
            await called(scope, receive, send)
        return (time.thread_time() - started) / count

    cost = min(asyncio.run(seconds(closed)) - asyncio.run(seconds(app)) for _ in range(5))
    assert cost < 200e-6
