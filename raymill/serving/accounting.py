"""What each request used: whose key, which model, how many tokens, how long, and with which status.

The tokens are those of the engine's own state of each sequence. So counting delays no request, streams need not ask for
their usage, and requests that a client breaks off count too.
"""

import datetime
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ray.util.metrics import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raymill.job_context import JobContext
from raymill.serving.errors import CLIENT_CLOSED_REQUEST, UNAVAILABLE
from raymill.serving.routing_state import RequestOutcome

current: ContextVar["RequestRecord | None"] = ContextVar("request_record", default=None)
"""The request that the running task handles. Tasks inherit it, so it reaches the engine through vLLM's own code."""


class RequestRecord:
    """A request to the API. Its numbers are final when the request has ended."""

    def __init__(self, route: str) -> None:
        """`route` is the method and the path."""
        self.route = route
        self.started_at = time.time()
        self.key = ""
        """Name of the key. Empty while no valid key is known."""
        self.model = ""
        """Model that the body names, or the app's own if it names none. Empty if the body was not read."""
        self.body_bytes = 0
        self.status = CLIENT_CLOSED_REQUEST
        self.first_s: float | None = None
        """Seconds until the first part of the answer. None if nothing was sent."""
        self.sequences: list[Any] = []
        """vLLM's state of each sequence (`vllm.v1.engine.output_processor.RequestState`)."""
        self.has_output = False
        """Whether the engine has generated something."""
        self.failure: Exception | None = None
        """Why the engine, or the parsing of its output, failed."""
        self.is_forwarded = False
        """Whether another app answers the request, and records it."""
        self.has_fallback = False
        """Whether the main model answers, and records, the request if this app's status is in UNAVAILABLE."""
        self._started = time.perf_counter()

    def elapsed_s(self) -> float:
        """Return the seconds since the request arrived."""
        return time.perf_counter() - self._started

    @property
    def is_recorded_elsewhere(self) -> bool:
        """Whether another app records the request. Only the app that answers a request records it."""
        return self.is_forwarded or (self.has_fallback and self.status in UNAVAILABLE)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts. A prompt with several answers (`n`) counts once, as in OpenAI's `usage`."""
        return sum(one.prompt_len for one in self.sequences if one.request_index == 0)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that the engine had already computed for an earlier request."""
        return sum(one.num_cached_tokens for one in self.sequences if one.request_index == 0)

    @property
    def completion_tokens(self) -> int:
        """Tokens that the engine has generated. Embeddings have none."""
        return sum(one.detokenizer.num_output_tokens() for one in self.sequences if one.detokenizer)


def ignore(record: RequestRecord) -> None:
    """Do nothing at the end of a request."""


def follow_sequences(engine_client: Any, *, share_prefix_cache: bool) -> None:
    """Add the state of each sequence that the engine accepts to the record of its request.

    Unless keys share the prefix cache, also set the sequence's `cache_salt` to one of its key. A hit in the cache makes
    the first token faster, so otherwise a key could find out what another one has asked. A salt that the client sends
    only divides the cache of its own key.

    The sequence's `priority` becomes a number of its key, for `fair_scheduler`, whatever the client sent.

    Relies on `output_processor` of vllm.v1.engine.async_llm.AsyncLLM, which calls its `add_request` for each sequence
    (also for each of `n` answers) before the engine gets it, in the task of the request, and keeps the sequence's state
    in `request_states` (vLLM 0.29).
    """
    processor = engine_client.output_processor
    add = processor.add_request
    secret = secrets.token_bytes(32)  # each replica has its own cache, so it can have its own secret
    numbers: dict[str, int] = {}  # of the keys

    def add_and_record(request: Any, *args: Any, **kwargs: Any) -> None:
        record = current.get()
        if record and not share_prefix_cache:
            salted = f"{record.key}\0{request.cache_salt or ''}".encode()
            request.cache_salt = hmac.digest(secret, salted, "sha256").hex()
        request.priority = numbers.setdefault(record.key if record else "", len(numbers))
        add(request, *args, **kwargs)
        if record:
            record.sequences.append(processor.request_states[request.request_id])

    processor.add_request = add_and_record


PREFIX = "access-"
MAX_FILE_BYTES = 4 * 2**20
"""Then a new file starts. A changed file is copied to the bucket as a whole, and only up to a size."""
MAX_FILES = 500
"""When a new file starts, the oldest of more files are deleted, so that a disk cannot fill up."""
MAX_TEXT = 200
"""Maximum characters of the model and the route, which a client chooses."""
WARNING_INTERVAL_S = 60.0

log = logging.getLogger("ray.serve")


class AccessLog:
    """The access log of one replica."""

    def __init__(self, folder: Path) -> None:
        """`folder` is used unless ACCESS_LOGS names another one."""
        self._folder = Path(JobContext.current().access_logs or folder)
        self._size = MAX_FILE_BYTES
        self._warned_at = -WARNING_INTERVAL_S

    def write(self, record: RequestRecord) -> None:
        """Write the line of a request that has ended."""
        started = datetime.datetime.fromtimestamp(record.started_at, datetime.UTC)
        line = json.dumps(
            {
                "time": started.isoformat(timespec="milliseconds"),
                "key": record.key,
                "model": record.model[:MAX_TEXT],
                "route": record.route[:MAX_TEXT],
                "status": record.status,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "completion_tokens": record.completion_tokens,
                "first_s": record.first_s and round(record.first_s, 4),
                "total_s": round(record.elapsed_s(), 4),
            }
        )
        try:
            if self._size >= MAX_FILE_BYTES:
                self._start_file()
            self._size += self._file.write(line.encode() + b"\n")
        except OSError as error:  # a full disk must not stop the server
            if time.monotonic() - self._warned_at >= WARNING_INTERVAL_S:
                self._warned_at = time.monotonic()
                log.warning(f"could not write to the access log in {self._folder}: {error}")

    def _start_file(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        self._file = (self._folder / name).open("ab", buffering=0)  # unbuffered, so that a dying replica loses no line
        self._size = 0
        for old in sorted(self._folder.glob(f"{PREFIX}*.log"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)


LABELS = ("key", "model")


class KeyMetrics:
    """Counts the requests and tokens of each key and model. Ray adds `ray_` and `_total` to the names."""

    def __init__(self) -> None:
        self._requests = Counter("key_requests", "Requests that reached the engine.", LABELS)
        self._tokens = {
            "prompt_tokens": Counter("key_prompt_tokens", "Tokens of prompts.", LABELS),
            "completion_tokens": Counter("key_completion_tokens", "Tokens that the engine generated.", LABELS),
        }

    def count(self, record: RequestRecord) -> None:
        """Count a request that has ended.

        Others do not count, because a client could invent any number of models and thus of time series.
        """
        if not record.sequences:
            return
        labels = {"key": record.key, "model": record.model}
        self._requests.inc(tags=labels)
        for name, counter in self._tokens.items():
            if tokens := getattr(record, name):  # inc() rejects 0
                counter.inc(tokens, labels)


class MetricsMiddleware:
    """ASGI middleware that passes the outcome of each POST request to `record`."""

    def __init__(self, app: ASGIApp, record: Callable[[RequestOutcome], None]) -> None:
        self.app = app
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status, first_s = CLIENT_CLOSED_REQUEST, 0.0

        async def timed_send(message: Message) -> None:
            nonlocal status, first_s
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not first_s:  # a stream's response starts before its first token
                first_s = time.perf_counter() - started

        try:
            await self.app(scope, receive, timed_send)
        except OSError:  # from `send`: the client disconnected, which is not the app's error
            raise
        except Exception:
            status = 500
            raise
        finally:
            self._record(RequestOutcome(status, first_s, time.perf_counter() - started))
