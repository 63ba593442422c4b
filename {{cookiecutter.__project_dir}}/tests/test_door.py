"""What stands before a served model: keys, limits, sizes, time, errors in OpenAI's shape; and what all that costs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.serving import keys as keys_module
from jobs.serving.door import Door, Rules
from jobs.serving.keys import Keys
from jobs.serving.limits import Limits

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
    async def fail(status: int) -> PlainTextResponse:
        if status == 500:
            raise ValueError("the inside")
        if status == 400:
            return PlainTextResponse("in plain text", 400)
        raise HTTPException(status, "in words")

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return app


def door(app: ASGIApp | None = None, *, per_minute: int = 100, at_once: int = 100, timeout_s: float = 5) -> TestClient:
    closed = Door(app or engine(), Keys(), Rules(per_minute, at_once, BODY, timeout_s))
    return TestClient(closed, raise_server_exceptions=False)


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
    monkeypatch.setattr("jobs.serving.limits.time", SimpleNamespace(monotonic=lambda: next(clock)))
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
    fits, too_large = b"x" * BODY, b"x" * (BODY + 1)
    assert client.post("/echo", content=fits, headers=ALICE).status_code == 200
    assert "larger than 1,000 bytes" in error(client.post("/echo", content=too_large, headers=ALICE), 413)["message"]
    pieces = client.post("/echo", content=iter([too_large[:500], too_large[500:]]), headers=ALICE)
    assert "larger than 1,000 bytes" in error(pieces, 413)["message"]


def test_an_answer_that_takes_too_long_is_ended(file: Path) -> None:
    assert error(door(timeout_s=0.2).get("/wait?seconds=9", headers=ALICE), 504)["code"] == "timeout"


def test_a_stream_that_takes_too_long_is_cut_off_and_not_ended(file: Path) -> None:
    closed = Door(engine(), Keys(), Rules(100, 100, BODY, timeout_s=0.2))
    sent = []

    async def cut() -> None:
        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            await asyncio.sleep(60)
            return {}

        header = (b"authorization", b"Bearer for-alice")
        scope = {"type": "http", "method": "GET", "path": "/stream", "query_string": b"seconds=9", "headers": [header]}
        await closed(scope, receive, send)

    with pytest.raises(TimeoutError):
        asyncio.run(cut())
    assert [message.get("more_body", True) for message in sent] == [True, True]  # started, and never ended


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


# ---------------------------------------------------------------- what it costs


def test_the_door_costs_less_than_200_microseconds_a_request(file: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", b"Bearer for-bob")]}
    closed = Door(app, Keys(), Rules(10**6, 100, BODY, 60))

    async def seconds(called: ASGIApp, count: int = 2000) -> float:
        started = time.perf_counter()
        for _ in range(count):
            await called(scope, receive, send)
        return (time.perf_counter() - started) / count

    cost = min(asyncio.run(seconds(closed)) - asyncio.run(seconds(app)) for _ in range(5))
    assert cost < 200e-6
