"""Test how the scheduler divides the engine among keys, without an engine. test_serve.py tests the effect."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("vLLM's CPU build exists for Linux only", allow_module_level=True)

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from raymill.serving import fair_scheduler
from raymill.serving.fair_scheduler import FairScheduler

ALICE, BOB, CAROL = range(3)
SEATS = 4
COMPILES = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


class Sequence:
    """A sequence in the engine."""

    def __init__(self, key: int, status: RequestStatus = RequestStatus.WAITING) -> None:
        self.priority = key
        self.status = status
        self.is_compiled = False
        self.needs_adapter = False


class FakeScheduler(FairScheduler):
    """Starts waiting sequences in their order, as vLLM does, while there are seats and blocks."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.waiting: Any = FCFSRequestQueue()
        self.skipped_waiting: Any = FCFSRequestQueue()
        self.max_num_running_reqs = SEATS
        self.max_num_scheduled_tokens = 100
        self.num_waiting_for_streaming_input = 0
        self.requires_kv_delivery = False
        self._refused, self._stuck = None, set()
        self.blocks = 100
        self.lost: list[Any] = []

    def add(self, *added: Sequence) -> None:
        for one in added:
            (self.skipped_waiting if one.status == COMPILES else self.waiting).append(one)

    def _try_promote_blocked_waiting_request(self, request: Any) -> bool:
        if request.is_compiled:
            request.status = RequestStatus.WAITING
        return request.is_compiled

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        request.status = RequestStatus.PREEMPTED
        self.lost.append(request)
        self.waiting.prepend_request(request)

    def start_waiting(self, throttle_prefills: bool) -> SimpleNamespace:
        """Stand in for `Scheduler.schedule`."""
        skipped = FCFSRequestQueue()
        while (queue := self.skipped_waiting or self.waiting) and len(self.running) < min(SEATS, self.blocks):
            one: Any = queue.pop_request()
            if one.needs_adapter or (one.status == COMPILES and not self._try_promote_blocked_waiting_request(one)):
                skipped.prepend_request(one)
            else:
                self.running.append(one)
        self.skipped_waiting.prepend_requests(skipped)
        return SimpleNamespace(total_num_scheduled_tokens=len(self.running))

    def counts(self) -> list[int]:
        """Return how many sequences of each key run."""
        return [sum(one.priority == key for one in self.running) for key in (ALICE, BOB, CAROL)]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """Return a scheduler in which 4 sequences of Alice run and 44 wait."""
    monkeypatch.setattr(Scheduler, "schedule", FakeScheduler.start_waiting)
    made = FakeScheduler()
    made.add(*(Sequence(ALICE) for _ in range(48)))
    made.schedule()
    assert (made.counts(), len(made.waiting)) == ([4, 0, 0], 44)
    return made


def test_a_sequence_of_another_key_starts_at_once(scheduler: FakeScheduler) -> None:
    newest = scheduler.running[-1]
    scheduler.add(bobs := Sequence(BOB))
    scheduler.schedule()
    assert scheduler.running[-1] is bobs
    assert (scheduler.counts(), scheduler.lost) == ([3, 1, 0], [newest])


def test_keys_share_the_engine_equally_and_then_nothing_is_lost(scheduler: FakeScheduler) -> None:
    scheduler.add(*(Sequence(BOB) for _ in range(48)))
    for _ in range(9):
        scheduler.schedule()
    assert (scheduler.counts(), len(scheduler.lost)) == ([2, 2, 0], 2)
    scheduler.add(Sequence(CAROL))
    for _ in range(9):
        scheduler.schedule()
    assert (sorted(scheduler.counts()), len(scheduler.lost)) == ([1, 1, 2], 3)


def test_what_ends_is_replaced_by_the_key_with_the_fewest(scheduler: FakeScheduler) -> None:
    waiting = list(scheduler.waiting)
    scheduler.add(*(Sequence(BOB) for _ in range(2)))
    for _ in range(3):
        scheduler.schedule()
    assert (scheduler.counts(), len(scheduler.lost)) == ([2, 2, 0], 2)
    lost = scheduler.lost[-1]
    scheduler.running = [one for one in scheduler.running if one.priority == ALICE]  # Bob's end
    scheduler.schedule()
    assert scheduler.counts() == [4, 0, 0]
    assert lost in scheduler.running  # what was interrupted continues before Alice's others start
    assert not set(waiting[:40]) & set(scheduler.running)


def test_a_key_that_is_alone_has_the_order_of_vllm(scheduler: FakeScheduler) -> None:
    expected = list(scheduler.waiting)
    for _ in range(5):
        scheduler.running.pop(0)
        scheduler.schedule()
    assert scheduler.running[1:] + list(scheduler.waiting) == expected[2:]
    assert scheduler.lost == []


def test_a_grammar_gives_no_advantage_and_no_disadvantage(scheduler: FakeScheduler) -> None:
    scheduler.waiting.clear()
    scheduler.add(*(schemas := [Sequence(ALICE, COMPILES) for _ in range(9)]))
    for one in schemas:
        one.is_compiled = True
    scheduler.add(Sequence(BOB), bobs := Sequence(BOB, COMPILES))
    for _ in range(5):
        scheduler.schedule()
    assert (scheduler.counts(), len(scheduler.lost)) == ([3, 1, 0], 1)  # nothing is lost for one that cannot start
    bobs.is_compiled = True
    for _ in range(5):
        scheduler.schedule()
    assert (scheduler.counts(), len(scheduler.lost)) == ([2, 2, 0], 2)
    assert bobs in scheduler.running


def test_nothing_is_lost_for_a_sequence_that_waits_for_an_adapter(scheduler: FakeScheduler) -> None:
    scheduler.add(bobs := Sequence(BOB))
    bobs.needs_adapter = True
    for _ in range(9):
        scheduler.schedule()
    assert (scheduler.counts(), len(scheduler.lost)) == ([4, 0, 0], 1)
    bobs.needs_adapter = False
    scheduler.running.pop(0)
    scheduler.schedule()
    assert scheduler.counts() == [3, 1, 0]


def test_a_key_does_not_keep_the_memory_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "schedule", FakeScheduler.start_waiting)
    made = FakeScheduler()
    made.blocks = 3  # one seat stays empty
    made.add(*(Sequence(ALICE) for _ in range(9)))
    made.schedule()
    made.add(Sequence(BOB))
    for _ in range(5):
        made.schedule()
    assert (made.counts(), len(made.lost)) == ([2, 1, 0], 1)


TOKENS = 100


def vllms_own(assets: Path) -> Scheduler:
    """Return a real scheduler."""
    block = 32
    config = VllmConfig(
        model_config=ModelConfig(model=str(assets / "model"), dtype="float32", max_model_len=256),
        scheduler_config=SchedulerConfig(
            max_num_seqs=SEATS, max_num_batched_tokens=512, max_model_len=256, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=False),
    )
    config.cache_config.num_gpu_blocks = 1000
    kept = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return fair_scheduler.create(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(1000, [], [KVCacheGroupSpec(["layer"], kept)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
    )


def test_masks_belong_to_keys_and_to_sequences_that_have_not_ended(assets: Path) -> None:
    made = vllms_own(assets)
    requests: list[Request] = []
    for key in (ALICE, BOB):
        output = StructuredOutputsParams(grammar='start: "a" | "b"\n')
        output._backend = "guidance"
        sampling = SamplingParams(max_tokens=TOKENS, structured_outputs=output)
        requests.append(Request(f"of {key}", [5] * 20, sampling, None, priority=key))
        made.structured_output_manager.grammar_init(requests[-1])
        made.add_request(requests[-1])
    while not all(one.structured_output_request.is_grammar_ready for one in requests):  # type: ignore[union-attr]
        time.sleep(0.01)  # until threads have compiled the grammars
    plan = made.schedule()
    masks = made.get_grammar_bitmask(plan)
    assert masks
    assert masks.structured_output_request_ids == ["of 0", "of 1"]
    alices, bobs = (request.structured_output_request.grammar for request in requests)  # type: ignore[union-attr]
    assert alices.budget is not bobs.budget  # type: ignore[union-attr]
    made.finish_requests("of 0", RequestStatus.FINISHED_ABORTED)  # its client has disconnected
    masks = made.get_grammar_bitmask(plan)
    assert masks
    assert masks.structured_output_request_ids == ["of 1"]


def test_vllms_own_scheduler_lets_another_key_in_at_the_next_step(assets: Path) -> None:
    """The real scheduler, with a model that always says the same token. Nothing that it was given is lost."""
    made, tokens = vllms_own(assets), TOKENS
    generated: dict[str, int] = {}

    def add(name: str, key: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        made.add_request(Request(name, [5] * 20, sampling, None, priority=key))

    def step() -> set[str]:
        plan = made.schedule()
        names = list(plan.num_scheduled_tokens)
        index = {name: number for number, name in enumerate(names)}
        for each in made.update_from_output(
            plan, ModelRunnerOutput(names, index, sampled_token_ids=[[7]] * len(names))
        ).values():
            for output in each.outputs:
                generated[output.request_id] = generated.get(output.request_id, 0) + len(output.new_token_ids)
        return set(names)

    for number in range(12):
        add(f"alice-{number}", ALICE)
    for _ in range(9):
        assert "alice-3" in step()
    add("bob", BOB)
    for _ in range(tokens):
        assert step() == {"alice-0", "alice-1", "alice-2", "bob"} or generated["alice-0"] == tokens
    assert generated["bob"] == tokens
    while made.has_unfinished_requests():
        step()
    assert generated == {"bob": tokens} | {f"alice-{number}": tokens for number in range(12)}
