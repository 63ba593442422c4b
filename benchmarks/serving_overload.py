"""Sends a served model more requests than it can answer, at a fixed rate, whether or not earlier ones are answered."""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp

from benchmarks import harness
from benchmarks.report import Result, at_least, at_most
from benchmarks.serving import KEY, LARGE, SHAPES, THREADS, TOKENS, VOCABULARY, pin, served
from raymill.serving.options import ServeOptions

FACTORS = (2, 4, 8)
ROUNDS, SECONDS, WARM_S = 3, 20.0, 5.0
AT_ONCE, QUEUED = 16, 32
CLIENTS = AT_ONCE + QUEUED // 2  # keep the engine busy without filling the queue
WANTED_GOODPUT, WANTED_REFUSAL_MS = 0.9, 300
REFUSED = (429, 503)


@dataclass
class Load:
    """What became of the requests that were sent in one turn."""

    answered_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Anything but an answer, or a 429 or 503 with Retry-After."""
    good: int = 0
    """Answers that arrived during the turn."""


def measure() -> Result:
    """Measure how much the server answers at best, and then at multiples of that rate."""
    os.environ["OMP_NUM_THREADS"] = THREADS
    with harness.scratch() as folder:
        (folder / ".env").write_text(f"SERVE_API_KEY={KEY}\n", encoding="utf-8")
        os.environ |= {"SECRETS_FILE": str(folder / ".env"), "SECRET_NAMES": "SERVE_API_KEY"}
        limits = {"max_ongoing_requests": AT_ONCE, "max_queued_requests": QUEUED, "key_requests_at_once": 10**6}
        with harness.one_ray():
            harness.write_model(folder / LARGE, VOCABULARY[LARGE], **SHAPES[LARGE])
            with served(folder / LARGE, max_num_seqs=AT_ONCE, **limits) as options:
                pin()
                asyncio.run(_closed(options, WARM_S))
                rounds = [_round(options, number) for number in range(ROUNDS)]
    return {"bars": list(_bars(rounds)), "rounds": list(_rows(rounds))}


def _round(options: ServeOptions, number: int) -> dict[float, tuple[float, Load]]:
    """Return, for each factor, the requests per second that were sent, and what became of them. 1 is the best rate."""
    best = asyncio.run(_closed(options, SECONDS))
    per_s = best.good / SECONDS
    found = {1.0: (per_s, best)}
    for factor in FACTORS if number % 2 == 0 else reversed(FACTORS):
        load = asyncio.run(_open(options, factor * per_s, random.Random(number)))
        found[factor] = factor * per_s, load
        print(
            f"{factor} x {per_s:.1f}/s: {load.good / SECONDS:.1f}/s answered, {len(load.refused_s)} refused", flush=True
        )
        time.sleep(WARM_S)
    return found


async def _closed(options: ServeOptions, seconds: float) -> Load:
    """Run clients that each send one request after another."""
    load, started = Load(), time.perf_counter()
    async with _session() as session:

        async def client() -> None:
            while time.perf_counter() - started < seconds:
                await _ask(session, options, load, started + seconds)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return load


async def _open(options: ServeOptions, per_s: float, draw: random.Random) -> Load:
    """Send `per_s` requests per second at random times (a Poisson process)."""
    load, started = Load(), time.perf_counter()
    async with _session() as session, asyncio.TaskGroup() as tasks:
        due = started
        while (due := due + draw.expovariate(per_s)) < started + SECONDS:
            await asyncio.sleep(due - time.perf_counter())
            tasks.create_task(_ask(session, options, load, started + SECONDS))
    return load


def _session() -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {KEY}"}
    return aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))


async def _ask(session: aiohttp.ClientSession, options: ServeOptions, load: Load, end: float) -> None:
    body = {
        "model": LARGE,
        "messages": [{"role": "user", "content": "a request"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    sent = time.perf_counter()
    try:
        async with session.post(f"{options.url}/chat/completions", json=body) as response:
            answer = await response.json()
    except (aiohttp.ClientError, ValueError) as error:
        load.others.append(repr(error))
        return
    now = time.perf_counter()
    if response.status == 200 and answer["usage"]["completion_tokens"] == TOKENS:
        load.answered_s.append(now - sent)
        load.good += now < end
    elif response.status in REFUSED and "Retry-After" in response.headers:
        load.refused_s.append(now - sent)
    else:
        load.others.append(f"{response.status} {answer}")


def _bars(rounds: list[dict[float, tuple[float, Load]]]) -> Iterator[dict]:
    for factor in FACTORS:
        ratio = statistics.median(found[factor][1].good / found[1.0][1].good for found in rounds)
        yield at_least(WANTED_GOODPUT, f"{factor} times the best rate: median ratio of goodput to the best", ratio)
        refused = sorted(1000 * one for found in rounds for one in found[factor][1].refused_s)
        yield at_most(WANTED_REFUSAL_MS, f"{factor} times the best rate: p95 of refusals in ms", _p95(refused))
    loads = [load for found in rounds for _, load in found.values()]
    yield at_most(0, "requests without an answer or a refusal with Retry-After", sum(len(one.others) for one in loads))


def _rows(rounds: list[dict[float, tuple[float, Load]]]) -> Iterator[dict]:
    for number, found in enumerate(rounds, 1):
        for factor, (per_s, load) in sorted(found.items()):
            yield {
                "round": number,
                "times the best": factor,
                "sent per_s": per_s,
                "answered per_s": load.good / SECONDS,
                "refused": len(load.refused_s),
                "p95 refused_ms": 1000 * _p95(sorted(load.refused_s)),
                "p50 answered_s": statistics.median(load.answered_s),
                "longest answered_s": max(load.answered_s),
                "others": "; ".join(sorted(set(load.others)))[:200],
            }


def _p95(values: list[float]) -> float:
    """Return the 95th percentile of sorted values, or 0 if there are none."""
    return values[int(0.95 * (len(values) - 1))] if values else 0.0


if __name__ == "__main__":
    harness.main(measure)
