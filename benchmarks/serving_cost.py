"""Measures what a request costs outside the engine: CPU time of the server, and the delay of the first token.

The engines have a core of their own, so they do not compete with the servers and the clients.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from benchmarks import harness
from benchmarks.report import Result, at_most
from benchmarks.serving import (
    KEY,
    LARGE,
    PAUSE_S,
    SECONDS,
    SHAPES,
    THREADS,
    VOCABULARY,
    WANTED_FIRST_MS,
    WARM_S,
    Side,
    bare,
    pin,
    send_load,
    served,
)

PAIRS = 12
CELLS = ((1, True), (32, True), (32, False))
"""Clients at once, and whether answers are streamed."""
WANTED_CPU = 1.1
IDLE_S = 30
OURS, BARE, PROXY = "replica", "vllm serve", "HAProxy"


def measure() -> Result:
    """Serve the model with both servers, and send load to one server at a time."""
    os.environ["OMP_NUM_THREADS"] = THREADS
    with harness.scratch() as folder:
        (folder / ".env").write_text(f"SERVE_API_KEY={KEY}\n", encoding="utf-8")
        os.environ |= {"SECRETS_FILE": str(folder / ".env"), "SECRET_NAMES": "SERVE_API_KEY"}
        with harness.one_ray():
            harness.write_model(folder / LARGE, VOCABULARY[LARGE], **SHAPES[LARGE])
            with served(folder / LARGE, max_num_seqs=32) as options, bare(options, folder / "vllm.log") as other:
                pin()
                sides = {OURS: Side(options.root, KEY), BARE: other}
                time.sleep(PAUSE_S)
                idle = _idle_ms_per_s()
                rows = [_compare(sides, idle, *cell) for cell in CELLS]
    return {"bars": list(_bars(rows)), "rounds": rows}


def _idle_ms_per_s() -> dict[str, float]:
    """Return the CPU time in ms that each server takes in a second without requests."""
    processes = _processes()
    before = {server: _cpu_s(those) for server, those in processes.items()}
    time.sleep(IDLE_S)
    return {server: 1000 * (_cpu_s(those) - before[server]) / IDLE_S for server, those in processes.items()}


def _compare(sides: dict[str, Side], idle: dict[str, float], concurrent: int, stream: bool) -> dict[str, Any]:
    """Measure both servers in pairs of turns. Return medians over the pairs."""
    processes = _processes()

    def turn(name: str) -> dict[str, float]:
        time.sleep(PAUSE_S)
        asyncio.run(send_load(sides[name], LARGE, concurrent, stream, WARM_S))
        before = {server: _cpu_s(those) for server, those in processes.items()}
        started = time.perf_counter()
        load = asyncio.run(send_load(sides[name], LARGE, concurrent, stream, SECONDS))
        elapsed_s = time.perf_counter() - started
        answered = load.per_s * elapsed_s
        cpu_ms = {server: 1000 * (_cpu_s(those) - before[server]) / answered for server, those in processes.items()}
        without_idle = cpu_ms[name] - idle[name] * elapsed_s / answered
        return cpu_ms | {"first_ms": load.first_ms, "without_idle_ms": without_idle}

    for name in sides:
        turn(name)
    pairs = []
    for number in range(PAIRS):
        pairs.append({name: turn(name) for name in (list(sides) if number % 2 == 0 else reversed(sides))})

    def median(value: Callable[[dict[str, dict[str, float]]], float]) -> float:
        return statistics.median(value(pair) for pair in pairs)

    row = {
        "concurrent": concurrent,
        "stream": stream,
        "replica cpu_ms": median(lambda pair: pair[OURS][OURS]),
        "HAProxy cpu_ms": median(lambda pair: pair[OURS][PROXY]),
        "vllm serve cpu_ms": median(lambda pair: pair[BARE][BARE]),
        "cpu ratio": median(lambda pair: pair[OURS][OURS] / pair[BARE][BARE]),
        "ratio without idle": median(lambda pair: pair[OURS]["without_idle_ms"] / pair[BARE]["without_idle_ms"]),
        "replica idle ms/s": idle[OURS],
        "vllm serve idle ms/s": idle[BARE],
        "later_ms": median(lambda pair: pair[OURS]["first_ms"] - pair[BARE]["first_ms"]),
    }
    print(row, flush=True)
    return row


def _processes() -> dict[str, list[psutil.Process]]:
    """Return the processes of each server, without the engines."""
    children = psutil.Process().children(recursive=True)
    names = {OURS: "ray::ServeRepl", PROXY: "haproxy"}
    found = {server: [one for one in children if one.name().startswith(name)] for server, name in names.items()}
    return found | {BARE: [one for one in children if "--disable-uvicorn-access-log" in one.cmdline()]}


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def _bars(rows: list[dict[str, Any]]) -> Iterator[dict]:
    for row in rows:
        where = f"{row['concurrent']} at once, {'streamed' if row['stream'] else 'whole'}"
        yield at_most(WANTED_CPU, f"{where}: median ratio of the replica's CPU time to vLLM's server", row["cpu ratio"])
        if row["stream"]:
            wanted = WANTED_FIRST_MS[row["concurrent"]]
            yield at_most(wanted, f"{where}: median delay of the first token in ms", row["later_ms"])


if __name__ == "__main__":
    harness.main(measure)
