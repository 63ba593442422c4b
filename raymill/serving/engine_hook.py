"""Follows each sequence into vLLM's engine: counts its tokens, and keeps the keys and their prefix caches apart."""

import hmac
import secrets
from typing import Any

from raymill.serving.accounting import current


def install(engine_client: Any, *, share_prefix_cache: bool) -> None:
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
