"""Ten minutes of a served model among rude clients, with its engine killed once: what became of every request."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Iterator

import psutil

from benchmarks import harness, visitors
from benchmarks.report import Result, at_most
from benchmarks.visitors import CLEAN, GRACE_S, TIMEOUT_S, Log, Visitor
from jobs.serve_llm import ServeOptions

CLIENTS = 32
MINUTE = 60.0
LENGTH_S, KILL_AT_S = 10 * MINUTE, 3 * MINUTE
WARM_AT_S = 7 * MINUTE  # long after a new engine has taken over
GROWTH_PERCENT = 2

Memory = list[tuple[float, float]]
"""Seconds since the start, and MiB of the replica, its engine and HAProxy."""


def measure() -> Result:
    """Serve a small model that was taught some facts, and let the clients come."""
    with visitors.a_served_model() as (options, answers):
        log, memory = asyncio.run(_soak(options, answers))
    return {"bars": list(_bars(log, memory)), "rounds": list(_phases(log)), "words": log.words}


async def _soak(options: ServeOptions, answers: dict[str, str]) -> tuple[Log, Memory]:
    log = Log()
    async with visitors.clients(options) as (client, http):
        staying = [
            Visitor(number, options, client, http, answers, log).stay(visitors.RUDE, lambda: log.now() > LENGTH_S)
            for number in range(CLIENTS)
        ]
        memory, *_ = await asyncio.gather(_watch_memory(log), _kill_the_engine(log), *staying)
    return log, memory


async def _watch_memory(log: Log) -> Memory:
    memory = []
    while log.now() < LENGTH_S:
        private = sum(harness.private_bytes(process) for process in _server_processes())
        memory.append((log.now(), private / 2**20))
        await asyncio.sleep(5)
    return memory


def _server_processes() -> list[psutil.Process]:
    names = ("ray::ServeRepl", "VLLM::", "haproxy")
    return [one for one in psutil.Process().children(recursive=True) if one.name().startswith(names)]


async def _kill_the_engine(log: Log) -> None:
    await asyncio.sleep(KILL_AT_S)
    engines = [one for one in _server_processes() if one.name().startswith("VLLM::Engine")]
    print(f"killing {engines} after {log.now():.0f} s", flush=True)
    for engine in engines:
        engine.kill()


def _bars(log: Log, memory: Memory) -> Iterator[dict]:
    back = _back_at(log)
    calm = [outcome for asked, over, outcome in log.ended if over < KILL_AT_S or asked > back]
    wild = [outcome for asked, over, outcome in log.ended if not (over < KILL_AT_S or asked > back)]
    yield at_most(0, "wrong or mixed-up answers", Counter(calm + wild)["wrong"])
    yield at_most(0, "requests lost while the engine lived", sum(outcome not in CLEAN for outcome in calm))
    unclean = ("hung", "cut off", "an error of another shape", "no connection")
    yield at_most(0, "requests that the kill left without an answer or a clean error", sum(map(wild.count, unclean)))
    longest = max(over - asked for asked, over, _ in log.ended)
    yield at_most(TIMEOUT_S + GRACE_S, "longest request, seconds", longest)
    early, late = (_mib(memory, start) for start in (WARM_AT_S, LENGTH_S - MINUTE))
    yield at_most(GROWTH_PERCENT, "growth of memory in the last three minutes, percent", 100 * (late / early - 1))


def _back_at(log: Log) -> float:
    """When the first request that was asked after the kill got its right answer."""
    return min(over for asked, over, outcome in log.ended if asked > KILL_AT_S + 1 and outcome == "right")


def _mib(memory: Memory, start: float) -> float:
    return statistics.median(mib for at, mib in memory if start <= at < start + MINUTE)


def _phases(log: Log) -> Iterator[dict]:
    last = max(over for _, over, _ in log.ended)
    ends = {"before the kill": KILL_AT_S, "until the next answer": _back_at(log), "after it": last}
    return visitors.by_phase(log, ends)


if __name__ == "__main__":
    harness.main(measure)
