"""Clients of a served model who know what it has to say, some of them rude; what becomes of each of their requests."""

import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import harness
from benchmarks.serving import KEY, SHAPES, SMALL, THREADS, VOCABULARY, served
from jobs.serve_llm import ServeOptions

FACTS, EPOCHS = 24, 20
TOKENS = 32
TIMEOUT_S = 30.0  # of a request, as the server holds it
GRACE_S = 5.0  # that a client gives the server beyond it
POLITE = {"stream": 1}
RUDE = {"stream": 80, "hang up": 10, "garbage": 4, "too much": 3, "wrong key": 3}
"""How often a client does what, of as many requests as these are together."""
EXPECTED = {"garbage": 400, "too much": 413, "wrong key": 401}
CLEAN = ("right", "hung up", "refused as it should be")


@dataclass
class Log:
    """What became of the requests."""

    started: float = field(default_factory=time.monotonic)
    ended: list[tuple[float, float, str]] = field(default_factory=list)
    """Of each request: seconds since the start when it was asked and when it was over, and how."""
    words: Counter[str] = field(default_factory=Counter)
    """What errors that no client asked for said."""

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


def by_phase(log: Log, phases: dict[str, float]) -> Iterator[dict]:
    """A row for each phase, of those requests that were over in it; `phases` names the second in which each ended.

    Median and 99th percentile are those of right answers; the longest is that of all requests.
    """
    start = 0.0
    for name, end in phases.items():
        here = [(over - asked, outcome) for asked, over, outcome in log.ended if start < over <= end]
        waits = sorted(wait for wait, outcome in here if outcome == "right") or [0.0]
        others = Counter(outcome for _, outcome in here if outcome != "right")
        yield {
            "phase": name,
            "seconds": end - start,
            "right": sum(outcome == "right" for _, outcome in here),
            "p50_s": statistics.median(waits),
            "p99_s": waits[int(0.99 * (len(waits) - 1))],
            "longest_s": max((wait for wait, _ in here), default=0.0),
            "others": ", ".join(f"{count} {what}" for what, count in others.items()),
        }
        start = end


@contextlib.contextmanager
def a_served_model(**changes: object) -> Iterator[tuple[ServeOptions, dict[str, str]]]:
    """A small model that was taught some facts, served with changed settings; and its answer to each question."""
    with harness.scratch() as folder:
        (folder / ".env").write_text(f"SERVE_API_KEY={KEY}\n", encoding="utf-8")
        os.environ |= {
            "SECRETS_FILE": str(folder / ".env"),
            "SECRET_NAMES": "SERVE_API_KEY",
            "OMP_NUM_THREADS": THREADS,
        }
        answers = _taught_model(folder / SMALL)
        with harness.one_ray(), served(folder / SMALL, request_timeout_s=TIMEOUT_S, **changes) as options:
            yield options, answers


def _taught_model(folder: Path) -> dict[str, str]:
    """Write a model that knows some docstrings; what it says to each question, greedily, by transformers itself."""
    harness.write_model(folder, VOCABULARY[SMALL], **SHAPES[SMALL])
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    facts = [fact for fact in harness.docstrings() if 40 < len(fact.answer) < 300][:: len(harness.docstrings()) // 100]
    for _ in range(EPOCHS):
        for fact in facts[:FACTS]:
            messages = [*_asking(fact.question), {"role": "assistant", "content": fact.answer}]
            tokens = tokenizer.apply_chat_template(messages, return_tensors="pt")["input_ids"]
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    answers = {}
    for fact in facts[:FACTS]:
        prompt = tokenizer.apply_chat_template(_asking(fact.question), add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        generated = model.generate(prompt, do_sample=False, max_new_tokens=TOKENS)
        answers[fact.question] = tokenizer.decode(generated[0, prompt.shape[1] :], skip_special_tokens=True)
    print(f"{len(set(answers.values()))} different answers to {len(answers)} questions", flush=True)
    return answers


def _asking(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@contextlib.asynccontextmanager
async def clients(options: ServeOptions) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx2.AsyncClient]]:
    """OpenAI's client, and a plain one for what that would not send."""
    async with httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None), timeout=TIMEOUT_S + GRACE_S) as http:
        yield openai.AsyncOpenAI(base_url=options.url, api_key=KEY, max_retries=0, http_client=http), http


@dataclass
class Visitor:
    """One client, which asks one thing after the other."""

    number: int
    options: ServeOptions
    client: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    answers: dict[str, str]
    log: Log

    async def stay(self, manners: dict[str, int], until: Callable[[], bool]) -> None:
        """Ask again and again; note what became of each request."""
        draw = random.Random(self.number)
        while not until():
            asked = self.log.now()
            manner = draw.choices(list(manners), list(manners.values()))[0]
            try:
                outcome = await (self._rude(manner, draw) if manner in EXPECTED else self._stream(manner, draw))
            except (openai.APITimeoutError, httpx2.TimeoutException):
                outcome = "hung"
            except openai.APIStatusError as error:
                outcome = self._refused(error.status_code, error.response.text)
            except openai.APIConnectionError as error:
                outcome = self._failed("no connection", str(error.__cause__))
            except openai.APIError as error:  # an error in the stream itself
                outcome = self._failed("an error in the stream", error.message)
            except httpx2.HTTPError as error:
                outcome = self._failed("cut off", type(error).__name__)
            self.log.ended.append((asked, self.log.now(), outcome))
            if outcome not in CLEAN:
                await asyncio.sleep(0.5)  # as clients that try again do

    async def _stream(self, manner: str, draw: random.Random) -> str:
        question = draw.choice(list(self.answers))
        said = ""
        async with await self.client.chat.completions.create(
            model=SMALL, messages=_asking(question), max_tokens=TOKENS, temperature=0, stream=True
        ) as stream:
            pieces = 0
            finished = False
            async for chunk in stream:
                said += chunk.choices[0].delta.content or ""
                finished = finished or chunk.choices[0].finish_reason is not None
                pieces += 1
                if manner == "hang up" and pieces == 4:
                    return "hung up"
        if not finished:
            return self._failed("cut off", "the stream ended without an end")
        return "right" if said == self.answers[question] else self._failed("wrong", f"{question} {said!r}")

    async def _rude(self, manner: str, draw: random.Random) -> str:
        body = {"model": SMALL, "messages": _asking("hi"), "max_tokens": 1}
        content = json.dumps(body).encode()
        if manner == "garbage":
            content = draw.randbytes(200) if draw.random() < 0.5 else json.dumps(body | {"messages": "hi"}).encode()
        if manner == "too much":
            content = bytes(int(self.options.max_body_mib * 2**20) + 1)
        key = "wrong" if manner == "wrong key" else KEY
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        answer = await self.http.post(f"{self.options.url}/chat/completions", content=content, headers=headers)
        if answer.status_code == EXPECTED[manner] and answer.json()["error"]["message"]:
            return "refused as it should be"
        return self._refused(answer.status_code, answer.text)

    def _refused(self, status: int, text: str) -> str:
        try:
            words = json.loads(text)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            return self._failed("an error of another shape", f"{status} {text[:200]}")
        self.log.words[f"{status} {words}"] += 1
        return f"error {status}"

    def _failed(self, outcome: str, words: str) -> str:
        self.log.words[f"{outcome}: {words}"] += 1
        return outcome
