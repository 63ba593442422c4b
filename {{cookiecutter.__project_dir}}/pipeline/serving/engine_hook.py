"""Follows each sequence into vLLM's engine, so that its tokens are counted."""

from typing import Any

from pipeline.serving.accounting import current


def count_tokens(engine_client: Any) -> None:
    """Add the state of each sequence that the engine accepts to the record of its request.

    Relies on `output_processor` of vllm.v1.engine.async_llm.AsyncLLM, which calls its `add_request` for each sequence
    (also for each of `n` answers) in the task of the request, and keeps the state in `request_states` (vLLM 0.29).
    """
    processor = engine_client.output_processor
    add = processor.add_request

    def add_and_record(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        if record := current.get():
            record.sequences.append(processor.request_states[request.request_id])

    processor.add_request = add_and_record
