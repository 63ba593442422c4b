"""Measures how much time keys, limits and accounting add to each request, with an app that answers at once."""

import asyncio
import functools
import os
import statistics
import time
from types import SimpleNamespace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks import harness
from benchmarks.report import Result, at_most
from raymill.serving import accounting
from raymill.serving.accounting import AccessLog, KeyMetrics
from raymill.serving.api_middleware import ApiMiddleware
from raymill.serving.keys import ApiKeys
from raymill.serving.rate_limits import RequestLimits
from raymill.serving.request_queue import QueueMiddleware

WANTED_US = 200
ROUNDS, REQUESTS = 9, 2000
CHUNKS = {"whole": 1, "streamed": 32}
PEOPLE = 10
SEQUENCE = SimpleNamespace(
    prompt_len=100, num_cached_tokens=0, request_index=0, detokenizer=SimpleNamespace(num_output_tokens=lambda: 32)
)
"""What the accounting reads of vLLM's state of a sequence."""


def measure() -> Result:
    """Time the app in this process, alternately with and without the middleware."""
    with harness.scratch() as folder:
        named = ",".join(f"person{number}:key-{number}" for number in range(PEOPLE))
        (folder / ".env").write_text(f"SERVE_API_KEY=the-owner's\nSERVE_API_KEYS={named}\n", encoding="utf-8")
        os.environ |= {"SECRETS_FILE": str(folder / ".env"), "SECRET_NAMES": "SERVE_API_KEY,SERVE_API_KEYS"}
        keys, log, metrics = ApiKeys(), AccessLog(folder), KeyMetrics()

        def end(record: accounting.RequestRecord) -> None:
            log.write(record)
            metrics.count(record)

        bars, rows = [], []
        for kind, chunks in CHUNKS.items():
            bare = _app(chunks)
            limits = RequestLimits(10**9, at_once=10, max_body=10**6, timeout_s=60, tokens_per_minute=10**12)
            protected = ApiMiddleware(QueueMiddleware(bare, limits), keys, limits, on_end=end)
            ways = {
                "with middleware": functools.partial(_microseconds, protected),
                "alone": functools.partial(_microseconds, bare),
            }
            rounds = harness.alternate(ways, ROUNDS, f"µs a request, {kind}")
            costs = [made["with middleware"] - made["alone"] for made in rounds]
            row = {"answer": kind, "pieces": chunks, "median_us": statistics.median(costs), "most_us": max(costs)}
            rows.append(row)
            bars.append(at_most(WANTED_US, f"{kind} answer: µs that keys and limits add", max(costs)))
    return {"bars": bars, "rounds": rows}


def _app(chunks: int) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if record := accounting.current.get():
            record.sequences.append(SEQUENCE)
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(chunks):
            await send({"type": "http.response.body", "body": b"data: {}", "more_body": number < chunks - 1})

    return app


def _microseconds(app: ASGIApp) -> float:
    """Return the mean microseconds per request."""
    headers = [(b"authorization", f"Bearer key-{PEOPLE - 1}".encode()), (b"content-length", b"100")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"messages": []}'.ljust(100)}

    async def send(message: Message) -> None:
        pass

    async def ask() -> float:
        started = time.perf_counter()
        for _ in range(REQUESTS):
            await app(scope, receive, send)
        return 1e6 * (time.perf_counter() - started) / REQUESTS

    return asyncio.run(ask())


if __name__ == "__main__":
    harness.main(measure)
