"""Checks every request during ten minutes in which some clients misbehave and the engine is killed once."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Iterator

import psutil

from benchmarks import harness, visitors
from benchmarks.report import Result, at_most
from benchmarks.visitors import CLEAN, GRACE_S, TIMEOUT_S, RequestLog, Visitor
from raymill.serving.options import ServeOptions

CLIENTS = 32
MINUTE = 60.0
LENGTH_S, KILL_AT_S = 10 * MINUTE, 3 * MINUTE
WARM_AT_S = 7 * MINUTE  # long after a new engine has replaced the killed one
GROWTH_PERCENT = 2
LOST = ("timed out", "cut off", "an error in another format", "no connection")

Memory = list[tuple[float, float]]
"""Samples of (seconds since the start, private MiB of the replica, its engine and HAProxy together)."""


def measure() -> Result:
    """Run the clients against a small model that was trained on some docstrings."""
    with visitors.served_model() as (options, answers):
        log, memory = asyncio.run(_soak(options, answers))
    return {"bars": list(_bars(log, memory)), "rounds": list(_phases(log)), "words": log.messages}


async def _soak(options: ServeOptions, answers: dict[str, str]) -> tuple[RequestLog, Memory]:
    log = RequestLog()
    async with visitors.clients(options) as (client, http):
        staying = [
            Visitor(number, options, client, http, answers, log).run(visitors.MISBEHAVING, lambda: log.now() > LENGTH_S)
            for number in range(CLIENTS)
        ]
        memory = asyncio.create_task(_watch_memory(log))
        await asyncio.gather(memory, _kill_engine(log), *staying)
    return log, memory.result()


async def _watch_memory(log: RequestLog) -> Memory:
    memory = []
    while log.now() < LENGTH_S:
        private = sum(harness.private_bytes(process) for process in _server_processes())
        memory.append((log.now(), private / 2**20))
        await asyncio.sleep(5)
    return memory


def _server_processes() -> list[psutil.Process]:
    names = ("ray::ServeRepl", "VLLM::", "haproxy")
    return [one for one in psutil.Process().children(recursive=True) if one.name().startswith(names)]


async def _kill_engine(log: RequestLog) -> None:
    await asyncio.sleep(KILL_AT_S)
    engines = [one for one in _server_processes() if one.name().startswith("VLLM::Engine")]
    print(f"killing {engines} after {log.now():.0f} s", flush=True)
    for engine in engines:
        engine.kill()


def _bars(log: RequestLog, memory: Memory) -> Iterator[dict]:
    recovered = _recovered_at(log)
    calm = [outcome for sent, over, outcome in log.ended if over < KILL_AT_S or sent > recovered]
    disturbed = [outcome for sent, over, outcome in log.ended if not (over < KILL_AT_S or sent > recovered)]
    yield at_most(0, "wrong answers", Counter(calm + disturbed)["wrong"])
    yield at_most(0, "failed requests while the engine was alive", sum(outcome not in CLEAN for outcome in calm))
    lost = sum(map(disturbed.count, LOST))
    yield at_most(0, "requests without an answer or a well-formed error after the kill", lost)
    longest = max(over - sent for sent, over, _ in log.ended)
    yield at_most(TIMEOUT_S + GRACE_S, "longest request, seconds", longest)
    early, late = (_mib(memory, start) for start in (WARM_AT_S, LENGTH_S - MINUTE))
    yield at_most(GROWTH_PERCENT, "growth of memory in the last three minutes, percent", 100 * (late / early - 1))


def _recovered_at(log: RequestLog) -> float:
    """Return the time of the first correct answer to a request that was sent after the kill."""
    return min(over for sent, over, outcome in log.ended if sent > KILL_AT_S + 1 and outcome == "correct")


def _mib(memory: Memory, start: float) -> float:
    return statistics.median(mib for at, mib in memory if start <= at < start + MINUTE)


def _phases(log: RequestLog) -> Iterator[dict]:
    last = max(over for _, over, _ in log.ended)
    ends = {"before the kill": KILL_AT_S, "until the next answer": _recovered_at(log), "after it": last}
    return visitors.by_phase(log, ends)


if __name__ == "__main__":
    harness.main(measure)
