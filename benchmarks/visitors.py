"""Clients that check every answer of a served model and log all outcomes. Some clients misbehave on purpose."""

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
from openai.types.chat import ChatCompletionUserMessageParam
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import harness
from benchmarks.serving import KEY, SHAPES, SMALL, THREADS, VOCABULARY, served
from raymill.serving.options import ServeOptions

FACTS, EPOCHS = 24, 20
TOKENS = 32
TIMEOUT_S = 30.0  # the server's time limit for a request
GRACE_S = 5.0  # a client waits this much longer than TIMEOUT_S before it gives up
POLITE = {"stream": 1}
MISBEHAVING = {"stream": 80, "disconnect": 10, "garbage": 4, "too much": 3, "wrong key": 3}
"""Kinds of requests, with their relative frequencies."""
EXPECTED = {"garbage": 400, "too much": 413, "wrong key": 401}
CLEAN = ("correct", "disconnected", "rejected as expected")


@dataclass
class RequestLog:
    """The outcomes of all requests."""

    started: float = field(default_factory=time.monotonic)
    ended: list[tuple[float, float, str]] = field(default_factory=list)
    """Start and end of each request in seconds since the start of the log, and its outcome."""
    messages: Counter[str] = field(default_factory=Counter)
    """Messages of unexpected errors."""

    def now(self) -> float:
        """Return the seconds since the start of the log."""
        return time.monotonic() - self.started


def by_phase(log: RequestLog, phases: dict[str, float]) -> Iterator[dict]:
    """Yield one row per phase, about the requests that ended in it. `phases` maps each phase to its end in seconds.

    The median and the 99th percentile cover only correct answers. The longest time covers all requests.
    """
    start = 0.0
    for name, end in phases.items():
        here = [(over - sent, outcome) for sent, over, outcome in log.ended if start < over <= end]
        latencies = sorted(latency for latency, outcome in here if outcome == "correct") or [0.0]
        others = Counter(outcome for _, outcome in here if outcome != "correct")
        yield {
            "phase": name,
            "seconds": end - start,
            "correct": sum(outcome == "correct" for _, outcome in here),
            "p50_s": statistics.median(latencies),
            "p99_s": latencies[int(0.99 * (len(latencies) - 1))],
            "longest_s": max((latency for latency, _ in here), default=0.0),
            "others": ", ".join(f"{count} {what}" for what, count in others.items()),
        }
        start = end


@contextlib.contextmanager
def served_model(**changes: object) -> Iterator[tuple[ServeOptions, dict[str, str]]]:
    """Serve a small model that was trained on some docstrings. Yield the options, and the answers by question."""
    with harness.scratch() as folder:
        (folder / ".env").write_text(f"SERVE_API_KEY={KEY}\n", encoding="utf-8")
        os.environ |= {
            "SECRETS_FILE": str(folder / ".env"),
            "SECRET_NAMES": "SERVE_API_KEY",
            "OMP_NUM_THREADS": THREADS,
        }
        answers = _train_model(folder / SMALL)
        with harness.one_ray(), served(folder / SMALL, request_timeout_s=TIMEOUT_S, **changes) as options:
            yield options, answers


def _train_model(folder: Path) -> dict[str, str]:
    """Write a model that is trained on some docstrings. Return transformers' greedy answer to each question."""
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


def _asking(question: str) -> list[ChatCompletionUserMessageParam]:
    return [{"role": "user", "content": question}]


@contextlib.asynccontextmanager
async def clients(options: ServeOptions) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx2.AsyncClient]]:
    """Yield an OpenAI client, and a plain HTTP client for requests that the OpenAI client would not send."""
    async with httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None), timeout=TIMEOUT_S + GRACE_S) as http:
        yield openai.AsyncOpenAI(base_url=options.url, api_key=KEY, max_retries=0, http_client=http), http


@dataclass
class Visitor:
    """A client that sends one request after another."""

    number: int
    options: ServeOptions
    client: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    answers: dict[str, str]
    log: RequestLog

    async def run(self, kinds: dict[str, int], until: Callable[[], bool]) -> None:
        """Send requests until `until` returns True, and log their outcomes."""
        draw = random.Random(self.number)
        while not until():
            sent = self.log.now()
            kind = draw.choices(list(kinds), list(kinds.values()))[0]
            try:
                outcome = await (self._misbehave(kind, draw) if kind in EXPECTED else self._stream(kind, draw))
            except (openai.APITimeoutError, httpx2.TimeoutException):
                outcome = "timed out"
            except openai.APIStatusError as error:
                outcome = self._unexpected(error.status_code, error.response.text)
            except openai.APIConnectionError as error:
                outcome = self._failed("no connection", str(error.__cause__))
            except openai.APIError as error:  # an error that arrives in the stream
                outcome = self._failed("an error in the stream", error.message)
            except httpx2.HTTPError as error:
                outcome = self._failed("cut off", type(error).__name__)
            self.log.ended.append((sent, self.log.now(), outcome))
            if outcome not in CLEAN:
                await asyncio.sleep(0.5)  # clients usually wait before they retry

    async def _stream(self, kind: str, draw: random.Random) -> str:
        question = draw.choice(list(self.answers))
        text = ""
        async with await self.client.chat.completions.create(
            model=SMALL, messages=_asking(question), max_tokens=TOKENS, temperature=0, stream=True
        ) as stream:
            chunks = 0
            finished = False
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                finished = finished or chunk.choices[0].finish_reason is not None
                chunks += 1
                if kind == "disconnect" and chunks == 4:
                    return "disconnected"
        if not finished:
            return self._failed("cut off", "the stream ended without a finish reason")
        return "correct" if text == self.answers[question] else self._failed("wrong", f"{question} {text!r}")

    async def _misbehave(self, kind: str, draw: random.Random) -> str:
        body = {"model": SMALL, "messages": _asking("hi"), "max_tokens": 1}
        content = json.dumps(body).encode()
        if kind == "garbage":
            content = draw.randbytes(200) if draw.random() < 0.5 else json.dumps(body | {"messages": "hi"}).encode()
        if kind == "too much":
            content = bytes(int(self.options.max_body_mib * 2**20) + 1)
        key = "wrong" if kind == "wrong key" else KEY
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        answer = await self.http.post(f"{self.options.url}/chat/completions", content=content, headers=headers)
        if answer.status_code == EXPECTED[kind] and answer.json()["error"]["message"]:
            return "rejected as expected"
        return self._unexpected(answer.status_code, answer.text)

    def _unexpected(self, status: int, text: str) -> str:
        try:
            words = json.loads(text)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            return self._failed("an error in another format", f"{status} {text[:200]}")
        self.log.messages[f"{status} {words}"] += 1
        return f"error {status}"

    def _failed(self, outcome: str, words: str) -> str:
        self.log.messages[f"{outcome}: {words}"] += 1
        return outcome
