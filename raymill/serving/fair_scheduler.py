"""The engine's scheduler, which divides the sequences that run at once fairly among the API keys.

`accounting.follow_sequences` stores the number of the key in the `priority` of each sequence. vLLM's default policy
ignores it.
"""

import time
from collections import Counter
from itertools import chain
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from raymill.serving import bounded_parsing, grammars
from raymill.serving.grammars import Grammars

SKIPPED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""States of sequences that a step had to skip, for example because too many adapters are in use."""


class FairScheduler(Scheduler):
    """Starts waiting sequences of the keys with the fewest running ones first, and makes room for them.

    If there is no room, the key with the most running sequences loses one, as long as it has two more than the key that
    waits. The lost sequence continues later. The prefix cache has most of what it has computed.

    Relies on `add_request`, `schedule`, `get_grammar_bitmask`, `requests`, `running`, `waiting`, `skipped_waiting`,
    `_try_promote_blocked_waiting_request` and `_preempt_request` of vllm.v1.core.sched.scheduler.Scheduler, and on
    `_get_reasoner` of StructuredOutputManager (vLLM 0.29).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused: Request | None = None
        self._stuck: set[Request] = set()

    def add_request(self, request: Request) -> None:
        """Add a sequence. Its grammar applies at once if the prompt ends the reasoning of the last turn.

        Only the API for chat completions has already found that out.
        """
        structured, reasoner = request.structured_output_request, self.structured_output_manager._get_reasoner(request)
        if structured and reasoner and structured.reasoning_ended is None:
            turn = bounded_parsing.last_turn(request.prompt_token_ids or [], reasoner.model_tokenizer.eos_token_id)
            structured.reasoning_ended = reasoner.is_reasoning_end(turn)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Choose the tokens of the next step. At most one sequence loses its room per step."""
        if self._keys_compete():
            running = Counter(one.priority for one in self.running)
            first = self._order_waiting(running)
            if first and (self._is_full() or first is self._refused):
                self._make_room(first, running)
        output = super().schedule(throttle_prefills)
        has_tokens = output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
        waits_for_memory = self.waiting and has_tokens and not self._is_full()
        self._refused = self.waiting.peek_request() if waits_for_memory else None
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Return the masks of the step's tokens."""
        backend = self.structured_output_manager.backend
        if not (isinstance(backend, Grammars) and scheduler_output.has_structured_output_requests):
            return super().get_grammar_bitmask(scheduler_output)
        # a sequence may have ended since it was scheduled
        requests = [self.requests[name] for name in scheduler_output.num_scheduled_tokens if name in self.requests]
        with backend.filling(requests):
            return super().get_grammar_bitmask(scheduler_output)

    def _keys_compete(self) -> bool:
        if not (self.waiting or self.skipped_waiting):
            return False
        return len({one.priority for one in chain(self.running, self.waiting, self.skipped_waiting)}) > 1

    def _is_full(self) -> bool:
        return len(self.running) + self.num_waiting_for_streaming_input >= self.max_num_running_reqs

    def _order_waiting(self, running: Counter[int]) -> Request | None:
        """Order the waiting sequences, and return the first one that only lacks room.

        Each gets the number of sequences of its key that come before it: the running ones, and the waiting ones that
        arrived earlier. The lowest number comes first.
        """
        ready = [one for one in self.skipped_waiting if self._is_ready(one)]
        stuck = [one for one in self.skipped_waiting if one.status in SKIPPED and one not in ready]
        self.skipped_waiting.remove_requests(ready + stuck)
        before, ranked = running.copy(), list[tuple[int, int, Request]]()
        for position, one in enumerate((*stuck, *ready, *self.waiting)):
            ranked.append((before[one.priority], position, one))
            before[one.priority] += 1
        ranked.sort(key=lambda entry: entry[:2])
        ordered = [one for _, _, one in ranked]
        queue: Any = self.waiting  # a deque
        queue.clear()
        queue.extend(ordered)
        self._stuck = (self._stuck | set(stuck)) & set(ordered)
        return next((one for one in ordered if one not in self._stuck), None)

    def _is_ready(self, one: Request) -> bool:
        """Return whether a sequence waited for its grammar, and has it now."""
        waits = one.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        return waits and self._try_promote_blocked_waiting_request(one)

    def _make_room(self, first: Request, running: Counter[int]) -> None:
        [(key, count)] = running.most_common(1) or [(first.priority, 0)]
        if count - running[first.priority] < 2:
            return
        last = next(one for one in reversed(self.running) if one.priority == key)
        self.running.remove(last)
        self._preempt_request(last, time.monotonic(), drop_stale_output=self.requires_kv_delivery)
        queue: Any = self.waiting
        queue.remove(last)  # `_preempt_request` puts it first
        queue.insert(queue.index(first) + 1, last)


class FairAsyncScheduler(FairScheduler, AsyncScheduler):
    """A FairScheduler that plans a step while the step before it runs."""


def create(*, vllm_config: Any, structured_output_manager: Any, **more: Any) -> Scheduler:
    """Return the scheduler for a configuration. vLLM calls this in the engine's process."""
    grammars.install_in_engine(vllm_config, structured_output_manager)
    bounded_parsing.read_prompts_once()
    more["structured_output_manager"] = structured_output_manager
    is_async = vllm_config.scheduler_config.async_scheduling
    return (FairAsyncScheduler if is_async else FairScheduler)(vllm_config=vllm_config, **more)


PATH = f"{__name__}.{create.__name__}"
"""vLLM's argument `scheduler_cls` for this scheduler."""
