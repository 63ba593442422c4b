"""Measures the served model under load, as clients see it: what `inv bench` runs."""

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

import settings
from cluster import chat

CONCURRENT = (1, 2, 4, 8, 16, 32)
TIMEOUT_S = 300.0
PAUSE_S = 0.5  # of a client after an error
WORDS = ["the", "of", "a", "river", "stone", "light", "paper", "window", "green", "seven", "carry", "under", "slowly"]
PROMPT_WORDS = 40
PERCENTILES = (50, 95)
HELD_BACK = (
    "the key may ask no more in a minute; inv submit serve_llm -- --key-requests-per-minute 100000, and measure again"
)


class Load(NamedTuple):
    """What each level of concurrency asks."""

    seconds: float
    """Time in which clients ask again and again; answers that were begun by then are waited for."""
    tokens: int
    """Length of each answer."""
    concurrent: tuple[int, ...] = CONCURRENT
    """Clients at once, level by level."""


class Seen(NamedTuple):
    """What a client saw of one answer."""

    first_s: float
    """Seconds until its first token."""
    between_s: float
    """Seconds from one token to the next, on average."""
    tokens: int


class Level(NamedTuple):
    """What so many clients at once saw."""

    concurrent: int
    first_ms: tuple[float, float]
    """Time to the first token: the median, and what 95 % did not exceed."""
    between_ms: tuple[float, float]
    """Time between tokens, likewise."""
    tokens_per_s: float
    requests_per_s: float
    errors: dict[str, int]
    """How often the server said what."""


def bench(
    url: str, secrets_at: Mapping[str, str], load: Load, console: Console, folder: Path = settings.PROJECT / "results"
) -> None:
    """Load the server level by level; leave the numbers and a plot of them in `folder`.

    Raises:
        settings.UserError: there is no key, the server is away or refuses it, or it answers nothing.
    """
    key = chat.key(secrets_at)
    with chat.explained(url):
        model = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=chat.TIMEOUTS).models.list().data[0].id
    seconds = load.seconds * len(load.concurrent)
    console.print(f"{model} at {url}: {len(load.concurrent)} levels of {load.seconds:g} s, about {seconds:g} s in all")
    levels = asyncio.run(_levels(url, key, model, load, console))
    console.print(_table(levels, load))
    for words, count in sum((Counter(level.errors) for level in levels), Counter()).most_common():
        console.print(f"{count} × {words}", highlight=False)
    folder.mkdir(exist_ok=True)
    saved = {"model": model, "tokens": load.tokens, "levels": [level._asdict() for level in levels]}
    (folder / "bench.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
    _plot(levels, model, folder / "bench.png")
    console.print(f"the plot is in {folder / 'bench.png'}, the numbers in {folder / 'bench.json'}", soft_wrap=True)


async def _levels(url: str, key: str, model: str, load: Load, console: Console) -> list[Level]:
    levels = []
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT_S) as client:
        for concurrent in load.concurrent:
            level = await _level(client, model, load, concurrent)
            if not level.requests_per_s and not levels:
                reason = next(iter(level.errors))
                raise settings.UserError(
                    f"{url} answered none of {concurrent} clients at once ({reason}): read its log with inv logs"
                )
            levels.append(level)
            console.print(f"{concurrent} at once: {level.tokens_per_s:,.0f} tokens/s")
            if HELD_BACK in level.errors:
                break  # more clients would measure the limit
    return levels


async def _level(client: openai.AsyncOpenAI, model: str, load: Load, concurrent: int) -> Level:
    seen: list[Seen] = []
    errors: Counter[str] = Counter()
    # connections, and what client and server do at a first request alone
    await asyncio.gather(
        *[_ask(client, model, f"warm {number}", 1) for number in range(concurrent)], return_exceptions=True
    )
    started = time.perf_counter()

    async def ask_again_and_again(number: int) -> None:
        draw = random.Random(f"{concurrent} {number}")  # the same prompts in each run, and none twice in one
        for question in itertools.count():
            if time.perf_counter() - started >= load.seconds:
                return
            prompt = " ".join([f"{concurrent}.{number}.{question}", *draw.choices(WORDS, k=PROMPT_WORDS)])
            try:
                seen.append(await _ask(client, model, prompt, load.tokens))
            except openai.RateLimitError:
                errors[HELD_BACK] += 1
                return
            except openai.APIError as error:
                errors[error.message] += 1
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*map(ask_again_and_again, range(concurrent)))
    elapsed = time.perf_counter() - started
    return Level(
        concurrent,
        _percentiles([1000 * one.first_s for one in seen]),
        _percentiles([1000 * one.between_s for one in seen]),
        sum(one.tokens for one in seen) / elapsed,
        len(seen) / elapsed,
        dict(errors),
    )


async def _ask(client: openai.AsyncOpenAI, model: str, prompt: str, tokens: int) -> Seen:
    asked = time.perf_counter()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},  # all answers of one length, whatever the model has to say
    )
    times, count = [], 0
    async for chunk in stream:
        if chunk.usage:
            count = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
    if not times:
        raise openai.APIError("the answer was empty", request=stream.response.request, body=None)
    count = count or len(times)
    return Seen(times[0] - asked, (times[-1] - times[0]) / max(1, count - 1), count)


def _percentiles(values: list[float]) -> tuple[float, float]:
    low, high = np.percentile(values, PERCENTILES) if values else (0.0, 0.0)
    return float(low), float(high)


def _table(levels: list[Level], load: Load) -> Table:
    table = Table(title=f"answers of {load.tokens} tokens", box=None)
    columns = ["at once", "first ms", "95 %", "between ms", "95 %", "tokens/s", "answers/s", "errors"]
    for column in columns:
        table.add_column(column, justify="right")
    for level in levels:
        times = [f"{ms:,.1f}" for ms in (*level.first_ms, *level.between_ms)]
        rates = [f"{level.tokens_per_s:,.0f}", f"{level.requests_per_s:,.1f}"]
        table.add_row(str(level.concurrent), *times, *rates, str(sum(level.errors.values())))
    return table


def _plot(levels: list[Level], model: str, file: Path) -> None:
    at_once = [level.concurrent for level in levels]
    figure = Figure(figsize=(13, 4), layout="constrained")
    rate, first, between = figure.subplots(1, 3)
    rate.plot(at_once, [level.tokens_per_s for level in levels], "o-")
    rate.set(title="tokens in a second")
    for axes, title, field in (
        (first, "ms to the first token", "first_ms"),
        (between, "ms between tokens", "between_ms"),
    ):
        for at, percentile in enumerate(PERCENTILES):
            axes.plot(at_once, [getattr(level, field)[at] for level in levels], "o-", label=f"{percentile} %")
        axes.set(title=title)
        axes.legend(title="not exceeded by")
    for axes in (rate, first, between):
        axes.set_xscale("log", base=2)
        axes.set_xticks(at_once, map(str, at_once))
        axes.set_xlabel("clients at once")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(model)
    figure.savefig(file, dpi=120)
