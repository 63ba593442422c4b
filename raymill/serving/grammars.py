"""Schemas, regular expressions and grammars that answers must match, with limits on what they cost other requests.

All of them become grammars of llguidance, whose time per step has a limit, so the same request always gets the same
result. With vLLM's default, the first request decides which library compiles all others.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.request import get_structured_output_key

from raymill.serving import grammar_worker
from raymill.serving.accounting import current
from raymill.serving.grammar_worker import Vocabulary

ENGINE_ARGS = {"structured_outputs_config": {"backend": "guidance"}}
KEPT_RESULTS, KEPT_GRAMMARS = 256, 32
MAX_LINE = 2**24  # bytes of the worker's answer
TIMEOUT_S = 20  # for the worker's answer, on a machine without a free CPU
SLOW_MASK_S = 0.01  # a usual mask takes 0.1 to 4 ms, for 131,072 tokens
MASK_BUDGET_S, MASK_BUDGET_PER_S = 0.5, 0.1  # CPU time of a key's slow masks, and what it gets back per second
STEP_TOO_COMPLEX = "the schema or grammar takes too long at this point of the answer; simplify its alternatives"
T = TypeVar("T")
log = logging.getLogger("ray.serve")


class GrammarChecker:
    """Compiles each new grammar in a process of its own before the engine does."""

    def __init__(self, vllm_config: Any, tokenizer: Any) -> None:
        found = _backend(vllm_config, tokenizer)
        self._vocabulary = vocabulary_of(found.ll_tokenizer) if found else None
        self._results: OrderedDict[bytes, _Result] = OrderedDict()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of the keys
        self._waiting: dict[int, asyncio.Future[_Result]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._sent = 0

    async def start(self) -> None:
        """Start the process, so that the first grammar need not wait for it."""
        if self._vocabulary:
            await self._started(self._vocabulary)

    async def check(self, params: Any) -> Any:
        """Return the parameters for the engine, which have a grammar of llguidance. Each key waits for its last check.

        Raises:
            VLLMValidationError: the schema, expression or grammar is invalid or too complex.
        """
        if self._vocabulary is None:
            raise _invalid("the model's tokenizer does not support schemas and grammars; leave them out")
        kind, text = get_structured_output_key(params)
        digest = hashlib.sha256(f"{kind.name} {text}".encode(errors="surrogatepass")).digest()
        record = current.get()
        async with self._locks[record.key if record else ""]:
            if digest not in self._results:
                self._results[digest] = await _to_its_end(self._ask(kind.name, text, self._vocabulary))
                if len(self._results) > KEPT_RESULTS:
                    self._results.popitem(last=False)
            self._results.move_to_end(digest)
            grammar, error = self._results[digest]
        if error:
            raise _invalid(error)
        return StructuredOutputsParams(grammar=grammar)

    async def _ask(self, kind: str, text: str, vocabulary: Vocabulary) -> "_Result":
        process = await self._started(vocabulary)
        self._sent += 1
        number, answer = self._sent, asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            assert process.stdin
            process.stdin.write(json.dumps({"id": number, "kind": kind, "text": text}).encode() + b"\n")
            return await asyncio.wait_for(answer, TIMEOUT_S)
        finally:
            del self._waiting[number]

    async def _started(self, vocabulary: Vocabulary) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", grammar_worker.__name__),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=MAX_LINE,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
                assert self._process.stdin
                self._process.stdin.write(vocabulary.encode())
                self._reading = asyncio.create_task(self._read(self._process))
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Read answers until the worker ends. Then fail the requests that wait for it."""
        assert process.stdout
        async for line in process.stdout:
            answer = json.loads(line)
            waiting = self._waiting.get(answer["id"])
            if waiting and not waiting.done():
                waiting.set_result(_Result(answer.get("grammar"), answer.get("error")))
        await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the process that compiles grammars ended; try again"))


async def _to_its_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine. If this is cancelled, wait for its end nevertheless, so that the key's lock stays locked."""
    task = asyncio.create_task(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _backend(vllm_config: Any, tokenizer: Any) -> GuidanceBackend | None:
    """Return vLLM's backend with llguidance's form of a tokenizer, or None if llguidance does not support it."""
    try:
        return Grammars(vllm_config, tokenizer, vllm_config.model_config.get_vocab_size())
    except Exception as error:
        log.warning("answers cannot follow schemas: llguidance does not support the model's tokenizer (%s)", error)
        return None


def install_in_engine(vllm_config: Any, manager: Any) -> None:
    """Let vLLM's StructuredOutputManager compile all grammars with `Grammars`."""
    manager.backend = _backend(vllm_config, manager.tokenizer)


class _Result(NamedTuple):
    """The grammar for llguidance, or the reason why there is none."""

    grammar: str | None
    error: str | None


def vocabulary_of(tokenizer: LLTokenizer) -> Vocabulary:
    """Return the vocabulary of llguidance's tokenizer."""
    numbers = range(tokenizer.vocab_size)
    special = [number for number in numbers if tokenizer.is_special_token(number)]
    return Vocabulary([tokenizer.decode_bytes([number]) for number in numbers], special, list(tokenizer.eos_tokens))


def _invalid(message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="response_format")


def install(engine_client: Any, checker: GrammarChecker) -> None:
    """Check the grammar of each sequence before the engine gets it.

    Relies on `generate` of vllm.v1.engine.async_llm.AsyncLLM, which each sequence passes, and on
    `validate_guidance_grammar`, which would compile the grammar in the event loop (vLLM 0.29).
    """
    engine_client.generate = _checked(engine_client.generate, checker)
    backend_guidance.validate_guidance_grammar = _accept  # type: ignore[assignment]


def _accept(*_: Any, **__: Any) -> None:
    """Accept a grammar, which the checker has compiled."""


def _checked(
    generate: Callable[..., AsyncGenerator[Any]], checker: GrammarChecker
) -> Callable[..., AsyncGenerator[Any]]:
    async def checked(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        params = getattr(sampling_params, "structured_outputs", None)
        has_grammar = params is not None and not params.all_constraints_none()
        if has_grammar:
            sampling_params.structured_outputs = await checker.check(params)
        async with contextlib.aclosing(generate(prompt, sampling_params, *args, **kwargs)) as outputs:
            async for output in outputs:
                if has_grammar and any(one.finish_reason == "error" for one in output.outputs):
                    raise VLLMValidationError(STEP_TOO_COMPLEX, parameter="response_format")
                yield output

    return checked


class MaskBudget:
    """Limits the time that slow masks of a key take, during which all sequences wait."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._since = time.monotonic()
        self._lock = Lock()  # vLLM computes the masks of large batches in threads

    def spend(self, seconds: float) -> bool:
        """Record the CPU time of a mask. Return whether the key may have more."""
        with self._lock:
            now = time.monotonic()
            slow = seconds if seconds >= SLOW_MASK_S else 0.0
            self._spent = max(0.0, self._spent - (now - self._since) * MASK_BUDGET_PER_S) + slow
            self._since = now
            return self._spent <= MASK_BUDGET_S


@dataclasses.dataclass
class LimitedGrammar(GuidanceGrammar):
    """A sequence's grammar. The sequence ends with an error where the grammar cannot continue."""

    backend: "Grammars | None" = None
    budget: MaskBudget = dataclasses.field(default_factory=MaskBudget)
    failed: bool = False

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """Write the mask of the next token, unless slow masks have used up the key's time."""
        if self.failed or not self.budget.spend(0):
            self.failed = True
            bitmask[idx].fill_(-1)  # any token, which `accept_tokens` then refuses
            return
        started = time.thread_time()
        # vLLM uses llguidance.torch, whose import takes seconds in the first step, because it prepares torch.compile
        fill_next_token_bitmask(self.ll_matcher, bitmask.numpy(), idx)
        self.check_error()
        self.budget.spend(time.thread_time() - started)
        self.failed = self.ll_matcher.is_error()

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Return whether the grammar allows the tokens.

        While vLLM fills masks for draft tokens, a refusal would end the engine. The next call then ends the sequence.
        """
        if self.failed:
            return self.backend is not None and self.backend.is_filling
        return super().accept_tokens(request_id, tokens)

    def rollback(self, num_tokens: int) -> None:
        """Take back tokens."""
        if not self.failed:
            super().rollback(num_tokens)


class Grammars(GuidanceBackend):
    """vLLM's backend for llguidance, which compiles each grammar once and limits the time of its steps.

    `StructuredOutputManager.backend` is set to it in the engine's process (vLLM 0.29).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_filling = False
        self._budgets: defaultdict[int, MaskBudget] = defaultdict(MaskBudget)  # by the numbers of the keys
        self._lock = Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> LimitedGrammar:
        """Return the grammar of a sequence. Threads of the engine call this, which `GrammarChecker` has checked."""
        if request_type != StructuredOutputOptions.GRAMMAR:
            raise ValueError(f"the grammar was not checked, because it is of the kind {request_type.name}")
        text = grammar_spec
        with self._lock:
            compiled, is_new = self._compiled.get(text), text not in self._compiled
            if compiled is None:
                compiled = self._compiled[text] = Future()
                if len(self._compiled) > KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(text)
        if is_new:
            limits = grammar_worker.limits(verbose_errors=False)  # they are logged
            compiled.set_result(LLMatcher(self.ll_tokenizer, text, limits=limits, log_level=0))
        matcher = compiled.result().deep_copy()
        grammar = LimitedGrammar(matcher, self.ll_tokenizer, self.vocab_size, backend=self)
        grammar.check_error()
        grammar.failed = matcher.is_error()
        return grammar

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Return masks that allow all tokens, as (sequences, words of 32 tokens)."""
        return torch.from_numpy(allocate_token_bitmask(max_num_seqs, self.ll_tokenizer.vocab_size))

    @contextlib.contextmanager
    def filling(self, requests: Iterable[Any]) -> Iterator[None]:
        """Let vLLM fill the masks of its requests, whose `priority` is the number of the key."""
        for request in requests:
            output = request.structured_output_request
            if output and isinstance(output.grammar, LimitedGrammar):
                output.grammar.budget = self._budgets[request.priority]
        self.is_filling = True
        try:
            yield
        finally:
            self.is_filling = False
