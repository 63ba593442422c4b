"""Checks every request to a served model while it gains a second replica under load, and later loses it."""

import asyncio
import csv
import os
import socket
import time
from pathlib import Path

from ray import serve

from benchmarks import harness, visitors
from benchmarks.report import Result, at_least, at_most
from benchmarks.visitors import CLEAN, RequestLog, Visitor
from raymill.serving.app import DEPLOYMENT
from raymill.serving.options import APP, ServeOptions

BUSY, IDLE = 16, 1  # clients
STAY_S = 20.0  # how long the clients keep running with two replicas, and later with one
TIMEOUT_S = 300.0
SETTINGS = {"max_replicas": 2, "target_ongoing_requests": 4, "upscale_delay_s": 5, "downscale_delay_s": 10}


def measure() -> Result:
    """Run BUSY clients until there are two replicas, then IDLE clients until there is one replica again."""
    with visitors.served_model(**SETTINGS) as (options, answers):
        log, phases, answered = asyncio.run(_scale(options, answers))
        left = _replicas()
    bars = [
        at_most(0, "requests that failed", sum(outcome not in CLEAN for _, _, outcome in log.ended)),
        at_least(2, "replicas that answered", len([count for count in answered.values() if count])),
        at_most(1, "replicas at the end", left),
    ]
    return {"bars": bars, "rounds": list(visitors.by_phase(log, phases)), "answered": answered, "words": log.messages}


async def _scale(options: ServeOptions, answers: dict[str, str]) -> tuple[RequestLog, dict[str, float], dict[str, int]]:
    log, phases = RequestLog(), {}
    async with visitors.clients(options) as (client, http):

        async def stay(count: int, replicas: int) -> None:
            """Run `count` clients until there are `replicas` replicas, and for STAY_S longer."""
            over = asyncio.Event()
            staying = [
                Visitor(number, options, client, http, answers, log).run(visitors.POLITE, over.is_set)
                for number in range(count)
            ]
            together = asyncio.gather(*staying)
            await _wait_for(replicas)
            phases[f"{count} clients, until {replicas} replicas"] = log.now()
            await asyncio.sleep(STAY_S)
            phases[f"{count} clients, {replicas} replicas"] = log.now()
            over.set()
            await together

        await stay(BUSY, 2)
        answered = _requests_by_replica()
        await stay(IDLE, 1)
    return log, phases, answered


async def _wait_for(replicas: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while await asyncio.to_thread(_replicas) != replicas:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{_replicas()} replicas run after {TIMEOUT_S:.0f} s, instead of {replicas}")
        await asyncio.sleep(1)


def _replicas() -> int:
    states = serve.status().applications[APP].deployments[DEPLOYMENT].replica_states
    return sum(states.values()) if set(states) == {"RUNNING"} else -1


def _requests_by_replica() -> dict[str, int]:
    """Return HAProxy's count of the requests that each replica got.

    https://docs.haproxy.org/3.0/management.html#9.3-show%20stat
    """
    socket_path = Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    (path,) = socket_path.parent.glob(f"*/{socket_path.name}")  # Ray gives each node its own folder
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b"show stat\n")
        text = connection.makefile().read().removeprefix("# ")
    rows = [row for row in csv.DictReader(text.splitlines()) if row["svname"] not in ("FRONTEND", "BACKEND")]
    return {row["svname"]: int(row["stot"] or 0) for row in rows if "backup" not in row["svname"]}


if __name__ == "__main__":
    harness.main(measure)
