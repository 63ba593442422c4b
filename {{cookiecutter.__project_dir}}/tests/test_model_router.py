"""Several models behind one address: who gets a request, what comes back, and how it is counted."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.serving import canary
from pipeline.serving.api_middleware import ApiMiddleware, RequestLimits
from pipeline.serving.canary import CANARY, NOWHERE, ROOT, RequestOutcome, Routes, RoutingState
from pipeline.serving.keys import Keys
from pipeline.serving.model_router import HUNG_UP, MetricsMiddleware, ModelRouter

PIECES, PAUSE_S = 40, 0.05
NOBODY = "http://127.0.0.1:9"


class Upstream:
    """A real server of two other apps; it remembers what it was asked and how far it came."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.sent = 0
        self.query = ""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        app = Starlette(routes=[Route("/{app:path}/v1/chat/completions", self._answer, methods=["POST"])])
        self.server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error"))

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append((f"/{request.path_params['app']}", body, request.headers.get("authorization")))
        self.query = request.url.query
        if status := body.get("fail"):
            return JSONResponse({"error": {"message": "no", "code": "some_code"}}, status)
        if body.get("wrong"):
            return JSONResponse({"error": {"message": "that is wrong"}}, 400)
        if not body.get("stream"):
            return JSONResponse({"from": request.path_params["app"]})
        self.sent = 0
        return StreamingResponse(self._pieces(), media_type="text/event-stream")

    async def _pieces(self) -> AsyncIterator[str]:
        for number in range(PIECES):
            self.sent += 1
            yield f"data: {number}\n\n"
            await asyncio.sleep(PAUSE_S)


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    thread = threading.Thread(target=server.server.run)
    thread.start()
    while not server.server.started:
        time.sleep(0.01)
    yield server
    server.server.should_exit = True
    thread.join()


async def own(request: Request) -> Response:
    body = await request.body()
    return JSONResponse({"from": "own", "body": body.decode()})


RULES = RequestLimits(per_minute=10_000, at_once=10, max_body=200_000, timeout_s=5)


@pytest.fixture(autouse=True)
def _with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("SERVE_API_KEY=key\n")
    monkeypatch.setenv("SECRETS_FILE", str(tmp_path / ".env"))
    monkeypatch.delenv("SECRETS_PREFIX", raising=False)


def fork(upstream: Upstream, routes: Routes, rules: RequestLimits = RULES) -> ApiMiddleware:
    """Return a fork behind the middleware that reads the body for it."""
    return fork_to(f"http://127.0.0.1:{upstream.port}", routes, rules)


def fork_to(root: str, routes: Routes, rules: RequestLimits = RULES) -> ApiMiddleware:
    app = Starlette(routes=[Route("/v1/chat/completions", own, methods=["POST"])])
    return ApiMiddleware(ModelRouter(app, "own", root, lambda: routes), Keys(), rules)


async def post(app: Any, body: Any, path: str = "/v1/chat/completions", **options: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json=body, headers={"Authorization": "Bearer key"}, **options)


BESIDE = Routes({"sql": "/models/sql", "sql-short": "/models/sql"}, None, 0)


@pytest.mark.parametrize(("model", "path"), [("own", "own"), ("sql", "models/sql"), ("sql-short", "models/sql")])
def test_a_model_answers_by_its_name(upstream: Upstream, model: str, path: str) -> None:
    answer = asyncio.run(post(fork(upstream, BESIDE), {"model": model}))
    assert answer.json()["from"] == path


def test_the_request_goes_on_as_it_was(upstream: Upstream) -> None:
    body = {"model": "sql", "messages": [{"role": "user", "content": "größer"}]}
    assert asyncio.run(post(fork(upstream, BESIDE), body)).status_code == 200
    assert upstream.asked[-1] == ("/models/sql", body, "Bearer key")
    own_body = {"model": "own", "messages": ["x" * 100_000]}
    assert json.loads(asyncio.run(post(fork(upstream, BESIDE), own_body)).json()["body"]) == own_body


@pytest.mark.parametrize("body", [{}, {"model": 3}, {"model": None}, {"model": "absent"}])
def test_what_names_no_other_model_stays(upstream: Upstream, body: Any) -> None:
    assert asyncio.run(post(fork(upstream, BESIDE), body)).json()["from"] == "own"


def test_a_canary_gets_its_share(upstream: Upstream) -> None:
    async def ask_many() -> int:
        app = fork(upstream, Routes({}, CANARY, 25))
        answers = [await post(app, {"model": "own"}) for _ in range(400)]
        return sum(answer.json()["from"] == "canary" for answer in answers)

    assert 60 < asyncio.run(ask_many()) < 140  # of 400, five standard deviations around 100


def test_an_error_is_handed_back(upstream: Upstream) -> None:
    answer = asyncio.run(post(fork(upstream, BESIDE), {"model": "sql", "wrong": True}))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "that is wrong")


def test_a_stream_arrives_piece_by_piece_and_ends_where_the_client_hangs_up(upstream: Upstream) -> None:
    arrived: list[float] = []

    async def run(give_up_after: int | None) -> None:
        arrived.clear()
        told = asyncio.Event()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b'{"model": "sql", "stream": true}'}

        async def send(message: Any) -> None:
            if message.get("body"):
                arrived.append(time.perf_counter())
            if len(arrived) == give_up_after:
                told.set()

        headers = [(b"authorization", b"Bearer key")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": headers,
        }
        asking = asyncio.create_task(fork(upstream, BESIDE)(scope, receive, send))
        if give_up_after:
            await told.wait()
            asking.cancel()  # as Serve does with the task of a client that is gone
            await asyncio.sleep(5 * PAUSE_S)
        else:
            await asking

    asyncio.run(run(None))
    assert len(arrived) == PIECES
    assert arrived[-1] - arrived[0] > PIECES * PAUSE_S / 2
    asyncio.run(run(3))
    assert upstream.sent < PIECES / 2


def test_behind_the_door_errors_keep_their_shape(upstream: Upstream) -> None:
    open_door = fork(upstream, BESIDE, RULES._replace(max_body=1000))
    too_large = asyncio.run(post(open_door, {"model": "sql", "messages": "x" * 2000}))
    assert too_large.status_code == 413

    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(100)

    async def without_length() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(open_door), base_url="http://test") as client:
            headers = {"Authorization": "Bearer key"}
            return await client.post("/v1/chat/completions", content=in_pieces(), headers=headers)

    assert asyncio.run(without_length()).status_code == 413
    answer = asyncio.run(post(fork_to(NOBODY, BESIDE), {"model": "sql"}))
    assert answer.status_code == 503
    message = "the app that serves this model, at /models/sql, does not respond: try again"
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"model": "\\ud83d"}'])
def test_a_body_that_no_parser_survives_goes_nowhere(upstream: Upstream, body: bytes) -> None:
    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(fork(upstream, BESIDE, RULES._replace(max_body=10**6)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Authorization": "Bearer key"}
            return await client.post("/v1/chat/completions", content=body, headers=headers)

    before = len(upstream.asked)
    assert asyncio.run(ask()).status_code == 400
    assert len(upstream.asked) == before


def test_the_route_without_a_key_is_the_apps_own(upstream: Upstream) -> None:
    before = len(upstream.asked)
    assert asyncio.run(post(fork(upstream, BESIDE), {"model": "sql"}, "/health")).status_code == 404
    assert len(upstream.asked) == before


@pytest.mark.parametrize("status", [404, 502, 503])
def test_the_base_model_answers_where_the_canary_cannot(upstream: Upstream, status: int) -> None:
    everything = Routes({}, CANARY, 100)
    assert asyncio.run(post(fork_to(NOBODY, everything), {"model": "own"})).json()["from"] == "own"
    body = {"model": "own", "fail": status}
    assert asyncio.run(post(fork(upstream, everything), body)).json()["body"] == json.dumps(body, separators=(",", ":"))
    assert upstream.asked[-1][:2] == (CANARY, body)


def test_what_a_canary_refuses_is_refused(upstream: Upstream) -> None:
    answer = asyncio.run(post(fork(upstream, Routes({}, CANARY, 100)), {"model": "own", "fail": 429}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "some_code")


@pytest.mark.parametrize("query", ["", "a=1&b=2", "a=%20%C3%BC%2B+&b"])
def test_the_query_goes_on_too(upstream: Upstream, query: str) -> None:
    asyncio.run(post(fork(upstream, BESIDE), {"model": "sql"}, f"/v1/chat/completions?{query}"))
    assert upstream.query == query


@pytest.mark.parametrize("path", ["/v1/chat/completions%3Fx", "/%00", "/v1/%ED%A0%80", "/%20%23%25"])
def test_no_path_breaks_it(upstream: Upstream, path: str) -> None:
    assert asyncio.run(post(fork(upstream, BESIDE), {"model": "sql"}, path=path)).status_code in (404, 503)


def test_a_request_that_comes_back_does_not_go_round(upstream: Upstream) -> None:
    """While an app is being deleted, its path leads to the app at the root."""
    before = len(upstream.asked)
    answer = asyncio.run(post(fork(upstream, BESIDE), {"model": "sql"}, "/models/sql/v1/chat/completions"))
    assert answer.status_code == 404
    assert len(upstream.asked) == before


# ---------------------------------------------------------------- what is counted


def test_each_request_is_counted_however_it_ends() -> None:
    records: list[RequestOutcome] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/late":
            await asyncio.sleep(10)
        if scope["path"] == "/broken":
            raise ValueError
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b"b"})

    async def nothing(*_: Any) -> Any:
        return {}

    async def ask(path: str, method: str = "POST") -> None:
        scope = {"type": "http", "method": method, "path": path, "headers": []}
        with contextlib.suppress(TimeoutError, ValueError):
            await asyncio.wait_for(MetricsMiddleware(app, records.append)(scope, nothing, nothing), 0.2)

    for path in ("/", "/late", "/broken"):
        asyncio.run(ask(path))
    asyncio.run(ask("/", "GET"))
    answered, hung_up, broken = records
    assert answered.status == 200
    assert 0.02 <= answered.first_s < answered.whole_s
    assert hung_up.status == HUNG_UP
    assert broken.status == 500


class Kept:
    """A store that outlives its users, like the cluster's."""

    def __init__(self) -> None:
        self._value = ""

    def load(self) -> Any:
        return self._value and json.loads(self._value)

    def save(self, value: Any) -> None:
        self._value = json.dumps(value)


def traffic_of(apps: set[str], store: Kept | None = None) -> RoutingState:
    return RoutingState(lambda: set(apps), store or Kept())


def test_replicas_learn_what_is_served_with_and_without_replicas() -> None:
    apps = {"llm", "llm-models-sql", "llm-canary"}
    told = traffic_of(apps)
    assert told.report(ROOT, ["own", "adapter"], []) == NOWHERE
    told.report("/models/sql", ["sql", "sql-short"], [])
    told.report(CANARY, ["own"], [])
    assert told.report(ROOT, ["own"], []) == BESIDE  # a canary without a share gets nothing
    told.give_canary(10, {"model": "new"})
    assert told.report(ROOT, ["own"], []) == Routes(BESIDE.others, CANARY, 10)
    apps.clear()  # Serve has deleted them, but their last replicas still report
    told.apps()
    assert told.report("/models/sql", ["sql"], []) == told.report(CANARY, ["own"], []) == NOWHERE
    assert told.canary() == {}


def test_an_app_without_replicas_stays_until_serve_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    apps = {"llm", "llm-models-sql", "llm-canary"}
    told = traffic_of(apps)
    for path, model in {ROOT: "own", "/models/sql": "sql", CANARY: "own"}.items():
        told.report(path, [model], [])
    told.give_canary(10, {"model": "new"})
    now = time.monotonic()
    monkeypatch.setattr(canary.time, "monotonic", lambda: now + 3600)
    assert told.report(ROOT, ["own"], []) == Routes({"sql": "/models/sql"}, CANARY, 10)
    assert told.apps()[ROOT]["models"] == ["own"]
    apps.remove("llm-models-sql")
    monkeypatch.setattr(canary.time, "monotonic", lambda: now + 3600 + canary.REPORT_INTERVAL_S)
    assert told.report(ROOT, ["own"], []) == Routes({}, CANARY, 10)
    assert set(told.apps()) == {ROOT, CANARY}


def test_what_is_served_and_the_canarys_share_outlive_the_actor() -> None:
    apps, store = {"llm", "llm-models-sql", "llm-canary"}, Kept()
    told = traffic_of(apps, store)
    for path, model in {ROOT: "own", "/models/sql": "sql", CANARY: "own"}.items():
        told.report(path, [model], [])
    told.give_canary(10, {"model": "new"})
    told = traffic_of(apps, store)
    assert told.report(ROOT, ["own"], []) == Routes({"sql": "/models/sql"}, CANARY, 10)
    assert told.canary() == {"model": "new"}
    told.give_canary(20)
    assert traffic_of(apps, store).apps()[CANARY]["percent"] == 20
    assert traffic_of({"llm"}, store).apps().keys() == {ROOT}
    assert traffic_of(apps, store).canary() == {}  # a new canary does not inherit the old one's share


def test_numbers_stand_beside_each_other_and_begin_anew_with_a_canary() -> None:
    told = traffic_of({"llm", "llm-canary"})
    told.report(ROOT, ["own"], [RequestOutcome(200, 1.0, 2.0)] * 10)
    told.give_canary(20, {"model": "new"})
    told.report(ROOT, ["own"], [RequestOutcome(200, 0.1, 0.2)] * 99 + [RequestOutcome(500, 0.0, 9.0)])
    told.report(CANARY, ["own"], [RequestOutcome(200, 0.3, 0.4)] * 3 + [RequestOutcome(429, 0.0, 0.0)])
    root, canary = told.apps()[ROOT], told.apps()[CANARY]
    assert (root["percent"], root["requests"], root["errors"]) == (80, 100, 1)
    assert (canary["percent"], canary["requests"], canary["errors"]) == (20, 4, 0)
    assert root["first_p50_ms"] == pytest.approx(100)
    assert canary["whole_p95_ms"] == pytest.approx(400)
    assert told.canary() == {"model": "new"}
    told.give_canary(0, {})
    assert told.canary() == {}
