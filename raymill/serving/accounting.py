"""What each request used: whose key, which model, how many tokens, how long, and with which status.

The tokens are those of the engine's own state of each sequence. So counting delays no request, streams need not ask for
their usage, and requests that a client breaks off count too.
"""

import time
from contextvars import ContextVar
from typing import Any

from raymill.serving.errors import CLIENT_CLOSED_REQUEST, UNAVAILABLE

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
