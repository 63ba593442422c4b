"""Schemas, regular expressions and grammars that answers must match, with limits on what they cost other requests.

All of them are grammars of llguidance: its time per step has a limit, and the same request gets the same result whatever
came before. With vLLM's default, the first request decides which library compiles all others.
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
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from threading import Lock
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    GuidanceGrammar,
    process_for_additional_properties,
    serialize_guidance_grammar,
)
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.request import get_structured_output_key

from pipeline.serving import grammar_worker, structural_tags
from pipeline.serving.accounting import current
from pipeline.serving.grammar_worker import INVALID, Vocabulary

# Objects have no more properties than the schema names, as with xgrammar and OpenAI's strict schemas.
ENGINE_ARGS = {"structured_outputs_config": {"backend": "guidance", "disable_additional_properties": True}}
KEPT_RESULTS, KEPT_GRAMMARS = 1024, 32
TIMEOUT_S = 20  # for the worker's answer, on a machine without a free CPU
# Seconds of masks that may be lost per second to grammars whose masks are slow. A usual mask takes 0.1 to 2 ms.
SLOW_MASK_S, MASK_BUDGET_S, MASK_BUDGET_PER_S = 0.01, 0.5, 0.1
STEP_TOO_COMPLEX = "the schema or grammar takes too long at this point of the answer; simplify its alternatives"
log = logging.getLogger("ray.serve")


def grammar_of(params: Any) -> str:
    """Return llguidance's grammar for vLLM's parameters of a structured output without a structural tag.

    Raises:
        ValueError: the schema, expression or grammar is invalid.
    """
    kind, text = get_structured_output_key(params)
    return _serialized(kind, text)


def _serialized(kind: StructuredOutputOptions, text: str) -> str:
    return serialize_guidance_grammar(kind, text, disable_additional_properties=True)


class GrammarChecker:
    """Compiles each new grammar in a process of its own before the engine does."""

    def __init__(self, vllm_config: Any, tokenizer: Any) -> None:
        self._results: OrderedDict[bytes, str | None] = OrderedDict()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of the keys
        self._waiting: dict[int, asyncio.Future[str | None]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._sent = 0
        self._vocabulary: Vocabulary | None = None
        self._special: dict[str, int] = {}  # numbers of the special tokens
        if read := _backend(vllm_config, tokenizer):
            self._vocabulary = vocabulary_of(read.ll_tokenizer)
            tokens, special, _ = self._vocabulary
            self._special = {tokens[number].decode(errors="replace"): number for number in special}

    async def start(self) -> None:
        """Start the process, so that the first grammar need not wait for it."""
        if self._vocabulary:
            await self._started(self._vocabulary)

    async def check(self, params: Any) -> Any:
        """Return the parameters for the engine.

        Raises:
            VLLMValidationError: the schema, expression or grammar is invalid or too complex.
        """
        try:
            params, grammar = self._grammar(params)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _invalid(f"{INVALID}{error}") from None
        if error := await self._error(grammar):
            raise _invalid(error)
        return params

    def _grammar(self, params: Any) -> tuple[Any, str]:
        if params.structural_tag is not None:
            text = structural_tags.to_grammar(params.structural_tag, self._special, process_for_additional_properties)
            params = dataclasses.replace(params, structural_tag=None, grammar=text)
        return params, grammar_of(params)

    async def _error(self, grammar: str) -> str | None:
        """Return why a grammar cannot be used. Each key has at most one in the worker."""
        if self._vocabulary is None:
            return "this model's tokenizer does not support schemas and grammars; leave them out"
        digest = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        record = current.get()
        async with self._locks[record.key if record else ""]:
            if digest not in self._results:
                self._results[digest] = await self._ask(grammar, self._vocabulary)
                if len(self._results) > KEPT_RESULTS:
                    self._results.popitem(last=False)
            self._results.move_to_end(digest)
            return self._results[digest]

    async def _ask(self, grammar: str, vocabulary: Vocabulary) -> str | None:
        process = await self._started(vocabulary)
        self._sent += 1
        number, answer = self._sent, asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            assert process.stdin
            process.stdin.write(json.dumps({"id": number, "grammar": grammar}).encode() + b"\n")
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
                waiting.set_result(answer["error"])
        await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the process that compiles grammars ended; try again"))


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


def _checked(generate: Callable[..., AsyncGenerator[Any]], checker: GrammarChecker) -> Callable[..., AsyncGenerator[Any]]:
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
    """Limits the time that slow masks take, during which all sequences wait."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._since = time.monotonic()
        self._lock = Lock()  # vLLM computes the masks of large batches in threads

    def spend(self, seconds: float) -> bool:
        """Record the CPU time of a mask. Return whether its grammar may continue."""
        if seconds < SLOW_MASK_S:
            return True
        with self._lock:
            now = time.monotonic()
            self._spent = max(0.0, self._spent - (now - self._since) * MASK_BUDGET_PER_S) + seconds
            self._since = now
            return self._spent <= MASK_BUDGET_S


@dataclasses.dataclass
class LimitedGrammar(GuidanceGrammar):
    """A sequence's grammar. The sequence ends with an error where the grammar cannot continue."""

    backend: "Grammars | None" = None
    failed: bool = False

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """Write the mask of the next token, unless slow masks have used up their time."""
        if self.failed:
            bitmask[idx].fill_(-1)  # any token, which `accept_tokens` then refuses
            return
        started = time.thread_time()
        super().fill_bitmask(bitmask, idx)
        assert self.backend
        in_budget = self.backend.budget.spend(time.thread_time() - started)
        self.failed = not in_budget or self.ll_matcher.is_error()

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Return whether the grammar allows the tokens.

        While vLLM fills masks for draft tokens, a refusal would end the engine. The next call then ends the sequence.
        """
        assert self.backend
        if self.failed:
            return self.backend.is_filling
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
        self.budget = MaskBudget()
        self.is_filling = False
        self._lock = Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> LimitedGrammar:
        """Return the grammar of a sequence. Threads of the engine call this, which `GrammarChecker` has checked."""
        text = _serialized(request_type, grammar_spec)
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

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Tell grammars that vLLM fills masks."""
        self.is_filling = True
        try:
            yield
        finally:
            self.is_filling = False
