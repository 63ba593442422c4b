"""Test several models at one address: routing, forwarding and metrics."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from processes import in_background
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raymill.serving import accounting, routing_state
from raymill.serving.accounting import CLIENT_CLOSED_REQUEST, MetricsMiddleware, RequestRecord
from raymill.serving.api_middleware import ApiMiddleware
from raymill.serving.keys import ApiKeys
from raymill.serving.model_router import ModelRouter
from raymill.serving.rate_limits import RequestLimits
from raymill.serving.routing_state import CANARY, NO_ROUTES, ROOT, RequestOutcome, Routes, RoutingState

CHUNKS, DELAY_S = 40, 0.05
UNREACHABLE = "http://127.0.0.1:9"


class Upstream:
    """A real server in place of the other apps. It records the requests and the number of chunks that it sends."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.sent = 0
        self.query = ""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        app = Starlette(routes=[Route("/{app:path}/v1/chat/completions", self._answer, methods=["POST"])])
        self.server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error"))

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append((f"/{request.path_params['app']}", body, request.headers.get("authorization")))
        self.query = request.url.query
        if status := body.get("fail"):
            return JSONResponse({"error": {"message": "no", "code": "some_code"}}, status)
        if body.get("invalid"):
            return JSONResponse({"error": {"message": "this is invalid"}}, 400)
        if not body.get("stream"):
            return JSONResponse({"from": request.path_params["app"]})
        self.sent = 0
        return StreamingResponse(self._chunks(), media_type="text/event-stream")

    async def _chunks(self) -> AsyncIterator[str]:
        for number in range(CHUNKS):
            self.sent += 1
            yield f"data: {number}\n\n"
            await asyncio.sleep(DELAY_S)


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    with in_background(server.server):
        yield server


async def own(request: Request) -> Response:
    body = await request.body()
    return JSONResponse({"from": "own", "body": body.decode()})


LIMITS = RequestLimits(per_minute=10_000, at_once=10, max_body=200_000, timeout_s=5)


@pytest.fixture(autouse=True)
def _with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("SERVE_API_KEY=key\n")
    monkeypatch.setenv("SECRETS_FILE", str(tmp_path / ".env"))
    monkeypatch.delenv("SECRETS_PREFIX", raising=False)


def router(upstream: Upstream, routes: Routes, limits: RequestLimits = LIMITS) -> ApiMiddleware:
    """Return a router behind the middleware that reads the body."""
    return router_to(f"http://127.0.0.1:{upstream.port}", routes, limits)


def router_to(
    root: str,
    routes: Routes,
    limits: RequestLimits = LIMITS,
    on_end: Callable[[RequestRecord], None] = accounting.ignore,
) -> ApiMiddleware:
    app = Starlette(routes=[Route("/v1/chat/completions", own, methods=["POST"])])
    return ApiMiddleware(ModelRouter(app, "own", root, lambda: routes), ApiKeys(), limits, on_end=on_end, model="own")


async def post(app: Any, body: Any, path: str = "/v1/chat/completions", **options: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json=body, headers={"Authorization": "Bearer key"}, **options)


TWO_NAMES = Routes({"sql": "/models/sql", "sql-short": "/models/sql"}, None, 0)


@pytest.mark.parametrize(("model", "path"), [("own", "own"), ("sql", "models/sql"), ("sql-short", "models/sql")])
def test_requests_are_routed_by_model_name(upstream: Upstream, model: str, path: str) -> None:
    answer = asyncio.run(post(router(upstream, TWO_NAMES), {"model": model}))
    assert answer.json()["from"] == path


def test_a_forwarded_request_is_unchanged(upstream: Upstream) -> None:
    body = {"model": "sql", "messages": [{"role": "user", "content": "größer"}]}
    assert asyncio.run(post(router(upstream, TWO_NAMES), body)).status_code == 200
    assert upstream.requests[-1] == ("/models/sql", body, "Bearer key")
    own_body = {"model": "own", "messages": ["x" * 100_000]}
    assert json.loads(asyncio.run(post(router(upstream, TWO_NAMES), own_body)).json()["body"]) == own_body


@pytest.mark.parametrize("routes", [TWO_NAMES, Routes({}, CANARY, 100)])
def test_only_the_app_that_answers_records_a_request_and_describes_its_limits(
    upstream: Upstream, routes: Routes
) -> None:
    records: list[RequestRecord] = []
    body = {"model": "own" if routes.canary else "sql"}
    for root in (f"http://127.0.0.1:{upstream.port}", UNREACHABLE):
        answer = asyncio.run(post(router_to(root, routes, on_end=records.append), body))
        assert ("x-ratelimit-limit-requests" in answer.headers) == (root == UNREACHABLE)
    assert [(record.key, record.model, record.status) for record in records] == [
        ("owner", body["model"], 200 if routes.canary else 503)
    ]


class CanaryReplica:
    """A real server with the canary's middleware, in front of an app that answers with `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.records: list[RequestRecord] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.root = f"http://127.0.0.1:{free.getsockname()[1]}"
        routes = [Route("/canary/v1/chat/completions", self._answer, methods=["POST"])]
        app = ApiMiddleware(Starlette(routes=routes), ApiKeys(), LIMITS, on_end=self.records.append, model="own")
        config = uvicorn.Config(app, port=int(self.root.rpartition(":")[2]), log_level="error")
        self.server = uvicorn.Server(config)

    async def _answer(self, request: Request) -> Response:
        return JSONResponse({"from": "canary"}, self.status)


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 502, 503])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/no/such/route"])
def test_a_request_is_recorded_once_by_the_app_that_answers(status: int, path: str) -> None:
    replica, own_records = CanaryReplica(), []
    replica.status = status
    main = router_to(replica.root, Routes({}, CANARY, 100), on_end=own_records.append)
    with in_background(replica.server):
        answer = asyncio.run(post(main, {"model": "own"}, path))
    by_canary = path == "/v1/chat/completions" and status not in (404, 502, 503)
    assert [record.status for record in replica.records] == ([status] if by_canary else [])
    assert [record.status for record in own_records] == ([] if by_canary else [answer.status_code])
    assert answer.status_code == (status if by_canary else 200 if path == "/v1/chat/completions" else 404)


@pytest.mark.parametrize("name", ["x-fallback-token", "X-Fallback-Token"])
def test_a_client_cannot_hide_its_requests(name: str) -> None:
    replica = CanaryReplica()
    replica.status = 404
    forged = ["", "1", ApiKeys().token.decode()[:-1], "\u00ff"]
    with in_background(replica.server):
        for value in forged:
            headers = [(b"authorization", b"Bearer key"), (name.encode(), value.encode("latin-1"))]
            answer = httpx2.post(f"{replica.root}/canary/v1/chat/completions", json={}, headers=headers)
            assert answer.status_code == 404
    assert [record.status for record in replica.records] == [404] * len(forged)


@pytest.mark.parametrize("body", [{}, {"model": 3}, {"model": None}, {"model": "absent"}])
def test_requests_for_other_names_are_not_forwarded(upstream: Upstream, body: Any) -> None:
    assert asyncio.run(post(router(upstream, TWO_NAMES), body)).json()["from"] == "own"


@pytest.mark.parametrize("body", [{"model": "own"}, {}, {"model": ""}])
def test_a_canary_gets_its_share(upstream: Upstream, body: Any) -> None:
    async def ask_many() -> int:
        app = router(upstream, Routes({}, CANARY, 25))
        answers = [await post(app, body) for _ in range(400)]
        return sum(answer.json()["from"] == "canary" for answer in answers)

    assert 60 < asyncio.run(ask_many()) < 140  # 100 of 400 are expected; the standard deviation is 8.7


def test_an_error_is_passed_back(upstream: Upstream) -> None:
    answer = asyncio.run(post(router(upstream, TWO_NAMES), {"model": "sql", "invalid": True}))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "this is invalid")


def test_a_stream_arrives_in_chunks_and_stops_when_the_client_disconnects(upstream: Upstream) -> None:
    arrived: list[float] = []

    async def run(disconnect_after: int | None) -> None:
        arrived.clear()
        reached = asyncio.Event()

        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b'{"model": "sql", "stream": true}'})

        async def send(message: Any) -> None:
            if message.get("body"):
                arrived.append(time.perf_counter())
            if len(arrived) == disconnect_after:
                reached.set()

        headers = [(b"authorization", b"Bearer key")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": headers,
        }
        task = asyncio.create_task(router(upstream, TWO_NAMES)(scope, messages.get, send))
        if disconnect_after:
            await reached.wait()
            messages.put_nowait({"type": "http.disconnect"})
        await task

    asyncio.run(run(None))
    assert len(arrived) == CHUNKS
    assert arrived[-1] - arrived[0] > CHUNKS * DELAY_S / 2
    asyncio.run(run(3))
    assert upstream.sent < CHUNKS / 2


def test_errors_behind_the_middleware_have_openais_format(upstream: Upstream) -> None:
    app = router(upstream, TWO_NAMES, LIMITS._replace(max_body=1000))
    too_large = asyncio.run(post(app, {"model": "sql", "messages": "x" * 2000}))
    assert too_large.status_code == 413

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(100)

    async def without_length() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as client:
            headers = {"Authorization": "Bearer key"}
            return await client.post("/v1/chat/completions", content=chunks(), headers=headers)

    assert asyncio.run(without_length()).status_code == 413
    answer = asyncio.run(post(router_to(UNREACHABLE, TWO_NAMES), {"model": "sql"}))
    assert answer.status_code == 503
    message = "the app that serves this model, at /models/sql, does not respond; try again"
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"model": "\\ud83d"}'])
def test_an_invalid_body_is_not_forwarded(upstream: Upstream, body: bytes) -> None:
    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(router(upstream, TWO_NAMES, LIMITS._replace(max_body=10**6)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Authorization": "Bearer key"}
            return await client.post("/v1/chat/completions", content=body, headers=headers)

    before = len(upstream.requests)
    assert asyncio.run(ask()).status_code == 400
    assert len(upstream.requests) == before


def test_health_checks_are_not_forwarded(upstream: Upstream) -> None:
    before = len(upstream.requests)
    assert asyncio.run(post(router(upstream, TWO_NAMES), {"model": "sql"}, "/health")).status_code == 404
    assert len(upstream.requests) == before


@pytest.mark.parametrize("status", [404, 502, 503])
def test_the_main_model_answers_if_the_canary_cannot(upstream: Upstream, status: int) -> None:
    all_to_canary = Routes({}, CANARY, 100)
    assert asyncio.run(post(router_to(UNREACHABLE, all_to_canary), {"model": "own"})).json()["from"] == "own"
    body = {"model": "own", "fail": status}
    answer = asyncio.run(post(router(upstream, all_to_canary), body))
    assert answer.json()["body"] == json.dumps(body, separators=(",", ":"))
    assert upstream.requests[-1][:2] == (CANARY, body)


def test_an_error_of_the_canary_is_passed_back(upstream: Upstream) -> None:
    answer = asyncio.run(post(router(upstream, Routes({}, CANARY, 100)), {"model": "own", "fail": 429}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "some_code")


@pytest.mark.parametrize("query", ["", "a=1&b=2", "a=%20%C3%BC%2B+&b"])
def test_the_query_is_forwarded(upstream: Upstream, query: str) -> None:
    asyncio.run(post(router(upstream, TWO_NAMES), {"model": "sql"}, f"/v1/chat/completions?{query}"))
    assert upstream.query == query


@pytest.mark.parametrize("path", ["/v1/chat/completions%3Fx", "/%00", "/v1/%ED%A0%80", "/%20%23%25"])
def test_odd_paths_do_not_break_the_router(upstream: Upstream, path: str) -> None:
    assert asyncio.run(post(router(upstream, TWO_NAMES), {"model": "sql"}, path=path)).status_code in (404, 503)


def test_a_forwarded_request_that_comes_back_is_not_forwarded_again(upstream: Upstream) -> None:
    """While an app is being deleted, its path leads to the app at the root."""
    before = len(upstream.requests)
    answer = asyncio.run(post(router(upstream, TWO_NAMES), {"model": "sql"}, "/models/sql/v1/chat/completions"))
    assert answer.status_code == 404
    assert len(upstream.requests) == before


# ---------------------------------------------------------------- metrics and state


def test_each_outcome_is_recorded() -> None:
    outcomes: list[RequestOutcome] = []

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
            await asyncio.wait_for(MetricsMiddleware(app, outcomes.append)(scope, nothing, nothing), 0.2)

    for path in ("/", "/late", "/broken"):
        asyncio.run(ask(path))
    asyncio.run(ask("/", "GET"))
    answered, disconnected, failed = outcomes
    assert answered.status == 200
    assert 0.02 <= answered.first_s < answered.total_s
    assert disconnected.status == CLIENT_CLOSED_REQUEST
    assert failed.status == 500


class FakeStore:
    """A store that outlives the actors that use it, like the cluster's own store."""

    def __init__(self) -> None:
        self._value = ""

    def load(self) -> Any:
        return self._value and json.loads(self._value)

    def save(self, value: Any) -> None:
        self._value = json.dumps(value)


def state_of(apps: set[str], store: FakeStore | None = None) -> RoutingState:
    return RoutingState(lambda: set(apps), store or FakeStore())


def test_replicas_get_the_current_routes() -> None:
    apps = {"llm", "llm-models-sql", "llm-canary"}
    state = state_of(apps)
    assert state.report(ROOT, ["own", "adapter"], []) == NO_ROUTES
    state.report("/models/sql", ["sql", "sql-short"], [])
    state.report(CANARY, ["own"], [])
    assert state.report(ROOT, ["own"], []) == TWO_NAMES  # a canary without a share gets no requests
    state.set_canary(10, {"model": "new"})
    assert state.report(ROOT, ["own"], []) == Routes(TWO_NAMES.others, CANARY, 10)
    apps.clear()  # Serve has deleted the apps, but their last replicas still report
    state.apps()
    assert state.report("/models/sql", ["sql"], []) == state.report(CANARY, ["own"], []) == NO_ROUTES
    assert state.canary() == {}


def test_a_canary_under_another_name_than_the_main_model_gets_no_requests() -> None:
    state = state_of({"llm", "llm-canary"})
    state.report(ROOT, ["own"], [])
    state.report(CANARY, ["own"], [])
    state.set_canary(10, {"model": "new"})
    assert state.report(ROOT, ["own", "adapter"], []).canary == CANARY
    assert state.report(ROOT, ["replaced"], []).canary is None


def test_the_main_model_keeps_the_requests_for_its_name() -> None:
    """An additional model can have an adapter of the same name, from the run that made the main model."""
    state = state_of({"llm", "llm-models-sql"})
    state.report("/models/sql", ["sql", "own", "other"], [])
    assert state.report(ROOT, ["own"], []).others == {"sql": "/models/sql", "other": "/models/sql"}


def test_an_app_without_replicas_stays_until_serve_deletes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    apps = {"llm", "llm-models-sql", "llm-canary"}
    state = state_of(apps)
    for path, model in {ROOT: "own", "/models/sql": "sql", CANARY: "own"}.items():
        state.report(path, [model], [])
    state.set_canary(10, {"model": "new"})
    now = time.monotonic()
    monkeypatch.setattr(routing_state.time, "monotonic", lambda: now + 3600)
    assert state.report(ROOT, ["own"], []) == Routes({"sql": "/models/sql"}, CANARY, 10)
    assert state.apps()[ROOT]["models"] == ["own"]
    apps.remove("llm-models-sql")
    monkeypatch.setattr(routing_state.time, "monotonic", lambda: now + 3600 + routing_state.REPORT_INTERVAL_S)
    assert state.report(ROOT, ["own"], []) == Routes({}, CANARY, 10)
    assert set(state.apps()) == {ROOT, CANARY}


def test_models_and_the_canarys_share_outlive_the_actor() -> None:
    apps, store = {"llm", "llm-models-sql", "llm-canary"}, FakeStore()
    state = state_of(apps, store)
    for path, model in {ROOT: "own", "/models/sql": "sql", CANARY: "own"}.items():
        state.report(path, [model], [])
    state.set_canary(10, {"model": "new"})
    state = state_of(apps, store)
    assert state.report(ROOT, ["own"], []) == Routes({"sql": "/models/sql"}, CANARY, 10)
    assert state.canary() == {"model": "new"}
    state.set_canary(20)
    assert state_of(apps, store).apps()[CANARY]["percent"] == 20
    assert state_of({"llm"}, store).apps().keys() == {ROOT}
    assert state_of(apps, store).canary() == {}  # a new canary does not inherit the old one's share


def test_metrics_start_from_zero_with_a_new_canary() -> None:
    state = state_of({"llm", "llm-canary"})
    state.report(ROOT, ["own"], [RequestOutcome(200, 1.0, 2.0)] * 10)
    state.set_canary(20, {"model": "new"})
    state.report(ROOT, ["own"], [RequestOutcome(200, 0.1, 0.2)] * 99 + [RequestOutcome(500, 0.0, 9.0)])
    state.report(CANARY, ["own"], [RequestOutcome(200, 0.3, 0.4)] * 3 + [RequestOutcome(429, 0.0, 0.0)])
    root, canary = state.apps()[ROOT], state.apps()[CANARY]
    assert (root["percent"], root["requests"], root["errors"]) == (80, 100, 1)
    assert (canary["percent"], canary["requests"], canary["errors"]) == (20, 4, 0)
    assert root["first_p50_ms"] == pytest.approx(100)
    assert canary["total_p95_ms"] == pytest.approx(400)
    assert state.canary() == {"model": "new"}
    state.set_canary(0, {})
    assert state.canary() == {}
