"""Compares a served model with bare `vllm serve`, by throughput and by the time to the first token."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
import requests

from benchmarks import harness
from benchmarks.report import Result, at_least, at_most
from raymill import settings
from raymill.network import free_ports
from raymill.serving import app, deploy, grammars, model_corrections
from raymill.serving.hooks import Hooks
from raymill.serving.options import ServeOptions

LARGE, SMALL = "30M", "tiny"
SHAPES = {
    LARGE: {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 7, "num_attention_heads": 8},
    SMALL: {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
}
VOCABULARY = {LARGE: 8192, SMALL: 1024}
WANTED = {LARGE: 0.97, SMALL: 0.85}
WANTED_BOUND = 0.93  # target for the lower bound of the large model's median ratio
WANTED_FIRST_MS = {1: 5, 32: 15}  # by concurrency: how many ms our first token may come after bare vLLM's
CONCURRENT = (1, 8, 32)
PAIRS, SECONDS, WARM_S = 25, 3.0, 0.25
PAUSE_S = 1.25  # after its work, vLLM's CPU worker busy-waits for 1 s, on a core that the other server needs
TOKENS = 32
SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2 * TOKENS,
}  # longer than the answers
WITH_SCHEMA = (32, True, True)  # a cell
THREADS = "1"  # one thread per engine leaves a core for everything else
ENGINE_CORE, OTHER_CORE = 0, 1
KEY = "the-benchmark's-own-key"


class Side(NamedTuple):
    """A server of one model. `root` is its address without the API's /v1."""

    root: str
    key: str


def pin() -> None:
    """Give the engines a core of their own. The servers and the clients share another.

    Raises:
        SystemExit: this machine has only one core.
    """
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("error: this benchmark needs two cores. Run it on a larger machine.")
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            core = ENGINE_CORE if process.name().startswith("VLLM::") else OTHER_CORE
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), {core})


class LoadResult(NamedTuple):
    """Throughput and latency of one server."""

    per_s: float
    """Requests per second."""
    first_ms: float
    """Median milliseconds until the first token of a stream, or until the complete answer."""


def measure(name: str = LARGE) -> Result:
    """Serve the model with both servers, and send load to one server at a time."""
    os.environ["OMP_NUM_THREADS"] = THREADS  # Ray passes this on to the replicas
    with harness.scratch() as folder:
        (folder / ".env").write_text(f"SERVE_API_KEY={KEY}\n", encoding="utf-8")
        os.environ |= {"SECRETS_FILE": str(folder / ".env"), "SECRET_NAMES": "SERVE_API_KEY"}
        with harness.one_ray():  # Ray's workers inherit the environment
            size = harness.write_model(folder / name, VOCABULARY[name], **SHAPES[name])
            print(f"{name}: a model of {size / 1e6:.1f} million parameters", flush=True)
            with served(folder / name, max_num_seqs=32) as options, bare(options, folder / f"{name}.log") as side:
                sides = {"ours": Side(options.root, KEY), "bare vLLM": side}
                cells = [*itertools.product(CONCURRENT, (False, True), (False,)), WITH_SCHEMA]
                found = [_compare(name, sides, *cell) for cell in cells]
    return {"bars": list(_bars(found)), "rounds": [_as_row(cell) for cell in found], "cells": found}


@contextlib.contextmanager
def served(model: Path, **changes: object) -> Iterator[ServeOptions]:
    """Serve a model with changed settings. Keys and limits apply, but the rate limit is too high to be reached."""
    (port,) = free_ports(1)
    changes |= {"model": str(model), "port": port, "key_requests_per_minute": 10**6}
    options = settings.load(ServeOptions, "serve", profile="local").model_copy(update=changes)
    deploy.deploy_model(options, Hooks())
    try:
        yield options
    finally:
        deploy.stop()


@contextlib.contextmanager
def bare(options: ServeOptions, log: Path) -> Iterator[Side]:
    """Serve the same model with `vllm serve`. Its output goes to `log`.

    The engine has the same arguments, but compiles schemas with vLLM's default library, and corrects no model.
    """
    (port,) = free_ports(1)
    ours = grammars.ENGINE_ARGS | model_corrections.arguments(options.engine)
    engine = {name: value for name, value in app.engine_args(options).items() if value not in (None, False)}
    words = [_argument(name, value) for name, value in engine.items() if name not in ours]
    command = [Path(sys.executable).with_name("vllm"), "serve", options.source, f"--port={port}", "--host=127.0.0.1"]
    command += [f"--served-model-name={options.served_name}", "--disable-uvicorn-access-log", *words]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        side = Side(f"http://127.0.0.1:{port}", "")
        _wait_until_healthy(side, process, log)
        yield side
    finally:
        process.terminate()
        process.wait(60)


def _argument(name: str, value: object) -> str:
    text = json.dumps(value) if isinstance(value, dict | list) else value
    return f"--{name.replace('_', '-')}" + ("" if value is True else f"={text}")


def _wait_until_healthy(side: Side, process: subprocess.Popen, log: Path) -> None:
    while True:
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{side.root}/health", timeout=5).ok:
                return
        if process.poll() is not None:
            sys.exit(f"{log.read_text(encoding='utf-8')}\nerror: vllm serve ended as printed above.")
        time.sleep(0.5)


def _compare(model: str, sides: dict[str, Side], concurrent: int, stream: bool, schema: bool) -> dict:
    """Measure both servers in pairs of turns. Return the medians, and the ratios of our throughput to vLLM's."""

    def turn(name: str) -> LoadResult:
        time.sleep(PAUSE_S)
        asyncio.run(send_load(sides[name], model, concurrent, stream, WARM_S, schema=schema))
        return asyncio.run(send_load(sides[name], model, concurrent, stream, SECONDS, schema=schema))

    for name in sides:
        turn(name)  # warm up: the first requests compile and allocate
    pairs = []
    for number in range(PAIRS):
        names = list(sides) if number % 2 == 0 else list(reversed(sides))
        pairs.append({name: turn(name) for name in names})
    cell = {"model": model, "concurrent": concurrent, "stream": stream, "schema": schema}
    ratios = [pair["ours"].per_s / pair["bare vLLM"].per_s for pair in pairs]
    medians = {
        f"{name} {field}": statistics.median(getattr(pair[name], field) for pair in pairs)
        for name in sides
        for field in LoadResult._fields
    }
    later_ms = statistics.median(pair["ours"].first_ms - pair["bare vLLM"].first_ms for pair in pairs)
    print(f"{cell}: {statistics.median(ratios):.3f} times bare vLLM's {medians['bare vLLM per_s']:.1f}/s", flush=True)
    found = {"later_ms": later_ms, "ratio": statistics.median(ratios), "bound": _bound(ratios), "ratios": ratios}
    return cell | medians | found


def _bound(ratios: list[float]) -> float:
    """Return the lower bound of the median's 95 % bootstrap interval (Efron 1979, percentile method)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return medians[250]


async def send_load(
    side: Side, model: str, concurrent: int, stream: bool, seconds: float, *, schema: bool = False
) -> LoadResult:
    """Run `concurrent` clients. Each sends one request after another until `seconds` have passed.

    With `schema`, each client's answers follow a schema of its own.
    """
    firsts: list[float] = []
    answered = 0
    headers = {"Authorization": f"Bearer {side.key}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()

        async def client(number: int) -> None:
            nonlocal answered
            for question in itertools.count():
                if (sent := time.perf_counter()) - started >= seconds:
                    return
                body: dict[str, Any] = {
                    "model": model,
                    "messages": [{"role": "user", "content": f"request {number}.{question} of many"}],
                    "max_tokens": TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": stream,
                }
                if schema:
                    own = SCHEMA | {"maxItems": SCHEMA["minItems"] + number}
                    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "own", "schema": own}}
                async with session.post(f"{side.root}/v1/chat/completions", json=body) as response:
                    response.raise_for_status()
                    first = await (_read_stream(response) if stream else _read(response))
                firsts.append(first - sent)
                answered += 1

        await asyncio.gather(*map(client, range(concurrent)))
        return LoadResult(answered / (time.perf_counter() - started), 1000 * statistics.median(firsts))


async def _read(response: aiohttp.ClientResponse) -> float:
    answer = await response.json()
    assert answer["usage"]["completion_tokens"] == TOKENS, answer
    return time.perf_counter()


async def _read_stream(response: aiohttp.ClientResponse) -> float:
    """Return the time at which the first token arrived, and check that the stream is complete."""
    first, last = 0.0, b""
    async for line in response.content:
        if line.startswith(b"data: "):
            last = line
            if not first and line != b"data: [DONE]\n" and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                first = time.perf_counter()
    assert last.startswith(b"data: [DONE]"), last
    return first


def _bars(found: list[dict]) -> Iterator[dict]:
    for cell in found:
        where = f"{cell['model']}, {cell['concurrent']} at once, {'streamed' if cell['stream'] else 'whole'}"
        where += ", with schemas" if cell["schema"] else ""
        yield at_least(WANTED[cell["model"]], f"{where}: median ratio of requests/s to bare vLLM", cell["ratio"])
        if cell["model"] != LARGE:
            continue
        yield at_least(WANTED_BOUND, f"{where}: lower bound of that median", cell["bound"])
        if cell["stream"] and cell["concurrent"] in WANTED_FIRST_MS and not cell["schema"]:
            most = WANTED_FIRST_MS[cell["concurrent"]]
            yield at_most(most, f"{where}: median delay of the first token in ms", cell["later_ms"])


def _as_row(cell: dict) -> dict:
    return {name: value for name, value in cell.items() if name != "ratios"}


if __name__ == "__main__":
    harness.main(measure)
