"""Measure the served model's latency and throughput under load. `inv bench` runs this."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openai
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from raymill import settings
from raymill.clients import chat
from raymill.console import cell
from raymill.errors import UserError

CONCURRENT = (1, 2, 4, 8, 16, 32)
TIMEOUT_S = 300.0
PAUSE_S = 0.5  # how long a client waits after an error
WORDS = ["the", "of", "a", "river", "stone", "light", "paper", "window", "green", "seven", "carry", "under", "slowly"]
PROMPT_WORDS = 40
PERCENTILES = (50, 95)
RATE_LIMITED = (
    "the key's rate limit is exceeded. Raise it, then measure again: "
    f"{settings.inv('submit serve_llm -- --key-requests-per-minute 100000')}"
)


class Load(NamedTuple):
    """The load to generate."""

    seconds: float
    """Duration of each level. After that, clients send no new requests, but wait for the answers in flight."""
    tokens: int
    """Length of each answer, in tokens."""
    concurrent: tuple[int, ...] = CONCURRENT
    """Number of concurrent clients at each level."""


class AnswerTimes(NamedTuple):
    """Times of one answer, as the client measured them."""

    first_s: float
    """Seconds to the first token."""
    between_s: float
    """Mean seconds between tokens."""
    tokens: int


class Level(NamedTuple):
    """Measurements at one level of concurrency."""

    concurrent: int
    first_ms: tuple[float, float]
    """Time to the first token: 50th and 95th percentile."""
    between_ms: tuple[float, float]
    """Time between tokens: 50th and 95th percentile."""
    tokens_per_s: float
    requests_per_s: float
    errors: dict[str, int]
    """Number of errors, by message."""


def bench(url: str, variables: Mapping[str, str], load: Load, console: Console, folder: Path | None = None) -> None:
    """Measure the server at each level of concurrency. Write the numbers and a plot to `folder`, or to results/.

    `variables` are the environment variables of submitted jobs, which say where to find the server's key.

    Raises:
        UserError: there is no key, or the server does not answer, rejects the key or fails the first requests.
    """
    key = chat.api_key(variables)
    with chat.readable_errors(url):
        model = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=chat.TIMEOUTS).models.list().data[0].id
    seconds = load.seconds * len(load.concurrent)
    console.print(
        f"{cell(model)} at {url}: {len(load.concurrent)} levels of {load.seconds:g} s, {seconds:g} s in total"
    )
    levels = asyncio.run(_levels(url, key, model, load, console))
    console.print(_table(levels, load))
    for message, count in sum((Counter(level.errors) for level in levels), Counter()).most_common():
        console.print(f"{count} × {cell(message)}", highlight=False)
    folder = folder or settings.PROJECT / "results"
    folder.mkdir(exist_ok=True)
    saved = {"model": model, "tokens": load.tokens, "levels": [level._asdict() for level in levels]}
    (folder / "bench.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
    _plot(levels, model, folder / "bench.png")
    console.print(f"plot: {folder / 'bench.png'}   numbers: {folder / 'bench.json'}", soft_wrap=True)


async def _levels(url: str, key: str, model: str, load: Load, console: Console) -> list[Level]:
    levels = []
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT_S) as client:
        for concurrent in load.concurrent:
            level = await _level(client, model, load, concurrent)
            if not level.requests_per_s and not levels:
                reason = next(iter(level.errors))
                raise UserError(
                    f"{url} answered no request from {concurrent} concurrent clients ({reason}). "
                    f"Run: {settings.inv('logs')}"
                )
            levels.append(level)
            console.print(f"{concurrent} clients: {level.tokens_per_s:,.0f} tokens/s")
            if RATE_LIMITED in level.errors:
                break  # more clients would only measure the limit
    return levels


async def _level(client: openai.AsyncOpenAI, model: str, load: Load, concurrent: int) -> Level:
    answers: list[AnswerTimes] = []
    errors: Counter[str] = Counter()
    # warm up, because the first requests are slower: they open connections and initialize client and server
    await asyncio.gather(
        *[_ask(client, model, f"warm {number}", 1) for number in range(concurrent)], return_exceptions=True
    )
    started = time.perf_counter()

    async def send_requests(number: int) -> None:
        draw = random.Random(f"{concurrent} {number}")  # the same prompts in every run, and no prompt twice in a run
        for question in itertools.count():
            if time.perf_counter() - started >= load.seconds:
                return
            prompt = " ".join([f"{concurrent}.{number}.{question}", *draw.choices(WORDS, k=PROMPT_WORDS)])
            try:
                answers.append(await _ask(client, model, prompt, load.tokens))
            except openai.RateLimitError:
                errors[RATE_LIMITED] += 1
                return
            except openai.APIError as error:
                errors[error.message] += 1
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*map(send_requests, range(concurrent)))
    elapsed = time.perf_counter() - started
    return Level(
        concurrent,
        _percentiles([1000 * answer.first_s for answer in answers]),
        _percentiles([1000 * answer.between_s for answer in answers]),
        sum(answer.tokens for answer in answers) / elapsed,
        len(answers) / elapsed,
        dict(errors),
    )


async def _ask(client: openai.AsyncOpenAI, model: str, prompt: str, tokens: int) -> AnswerTimes:
    sent = time.perf_counter()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},  # so that all answers have the same length
    )
    times, count = [], 0
    async for chunk in stream:
        if chunk.usage:
            count = chunk.usage.completion_tokens
        delta = chunk.choices[0].delta if chunk.choices else None
        if delta and (delta.content or getattr(delta, "reasoning", None)):
            times.append(time.perf_counter())
    if not times:
        raise openai.APIError("the answer was empty", request=stream.response.request, body=None)
    count = count or len(times)
    return AnswerTimes(times[0] - sent, (times[-1] - times[0]) / max(1, count - 1), count)


def _percentiles(values: list[float]) -> tuple[float, float]:
    low, high = np.percentile(values, PERCENTILES) if values else (0.0, 0.0)
    return float(low), float(high)


def _table(levels: list[Level], load: Load) -> Table:
    table = Table(title=f"answers of {load.tokens} tokens", box=None)
    columns = ["clients", "first token ms", "p95", "between tokens ms", "p95", "tokens/s", "answers/s", "errors"]
    for column in columns:
        table.add_column(column, justify="right")
    for level in levels:
        times = [f"{ms:,.1f}" for ms in (*level.first_ms, *level.between_ms)]
        rates = [f"{level.tokens_per_s:,.0f}", f"{level.requests_per_s:,.1f}"]
        table.add_row(str(level.concurrent), *times, *rates, str(sum(level.errors.values())))
    return table


def _plot(levels: list[Level], model: str, file: Path) -> None:
    clients = [level.concurrent for level in levels]
    figure = Figure(figsize=(13, 4), layout="constrained")
    rate, first, between = figure.subplots(1, 3)
    rate.plot(clients, [level.tokens_per_s for level in levels], "o-")
    rate.set(title="tokens per second")
    for axes, title, field in (
        (first, "time to first token (ms)", "first_ms"),
        (between, "time between tokens (ms)", "between_ms"),
    ):
        for index, percentile in enumerate(PERCENTILES):
            axes.plot(clients, [getattr(level, field)[index] for level in levels], "o-", label=f"p{percentile}")
        axes.set(title=title)
        axes.legend()
    for axes in (rate, first, between):
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, map(str, clients))
        axes.set_xlabel("concurrent clients")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(model)
    figure.savefig(file, dpi=120)
