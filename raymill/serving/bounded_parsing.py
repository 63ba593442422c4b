"""Bounds the time for which vLLM parses an answer. Parsers run in the event loop, where all requests would wait.

A client can make a model repeat a marker until a parser takes minutes. Each request has a `Budget` of CPU time, after
which its answer is plain text. Three slow parts of vLLM are replaced, so that ordinary answers stay far below it: the
lexer of its shared parser, the reading of prompts for Qwen3, and the list of messages for Harmony.

Relies on ParserManager.get_parser, and on the names in the methods that `install` replaces (vLLM 0.29).
"""

import ctypes
import functools
import gc
import itertools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import regex

from raymill.serving import deepseek_calls

log = logging.getLogger("ray.serve")
BASE_S, PER_CHARACTER_S, MAX_S = 0.2, 1e-5, 0.5  # 10 times what ordinary answers take
LONG_PER_CHARACTER_S = 5e-6  # of answers with more than 100,000 characters, which take minutes to generate
TOKEN_CHARACTERS = 4  # gpt-oss's parser reads tokens
FREE_S = 0.05  # of each piece of a stream, because a stream is parsed again and again
SLOW_S, SLOW_PIECES = 0.005, 3  # as many pieces in a row that take longer are followed by a pause
PAUSE, MAX_PAUSE_S = 9, 0.5  # a parser uses at most a tenth of the time, and a client sees progress
CHECK_S = 0.05
SLICE = 256  # characters. vLLM's lexer copies all that it has not read for each token that it finds
PACKAGES = ("vllm.tool_parsers.", "vllm.parser.", "vllm.reasoning.")
MATCHES = ("match", "fullmatch", "search", "finditer", "findall", "sub", "subn", "split")
T = TypeVar("T")


class TooSlow(BaseException):  # not an Exception, which parsers catch
    """Parsing an answer takes too long."""


class Budget:
    """What the parsers of one request have used."""

    def __init__(self, request: Any) -> None:
        self.request = request  # keeps its id in use
        self.characters = 0
        self.seconds = 0.0

    def left(self) -> float:
        usual = min(MAX_S, BASE_S + PER_CHARACTER_S * self.characters)
        return max(usual, LONG_PER_CHARACTER_S * self.characters) - self.seconds


_budgets: weakref.WeakValueDictionary[int, Budget] = weakref.WeakValueDictionary()
"""Budget by id of the request. A request with n = 48 has 48 parsers."""


@dataclass
class Running:
    """A call that must end in time."""

    thread: int
    clock: int
    """Clock of the thread's CPU time."""
    deadline: float
    stopped: bool = False
    """Whether the watchdog has raised an error in the thread."""

    def left(self) -> float:
        return self.deadline - time.clock_gettime(self.clock)


_running: Running | None = None
_lock = threading.Lock()
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what a function returns. The watchdog stops it after this CPU time.

    Raises:
        TooSlow: the time is over.
    """
    global _running
    if _running is not None:  # a parser that calls itself
        return call()
    thread = threading.get_ident()
    collects = gc.isenabled()
    gc.disable()  # the garbage of other requests would count, too
    _running = Running(thread, time.pthread_getcpuclockid(thread), time.thread_time() + seconds)
    try:
        try:
            return call()
        except TimeoutError:  # of an iterator over matches
            raise TooSlow from None
        finally:
            _end()
    except TooSlow:
        _end()  # which this error may have interrupted
        raise
    finally:
        if collects:
            gc.enable()


def _end() -> None:
    """End the time limit. After this, the watchdog raises nothing."""
    global _running
    with _lock:
        if _running is not None and _running.stopped:
            _raise_in(ctypes.c_ulong(_running.thread), None)  # forget an error that the thread has not seen yet
        _running = None


def _watch() -> None:
    while True:
        time.sleep(CHECK_S)
        with _lock:
            if _running is not None and _running.left() < 0:
                _running.stopped = True  # raise it until the call ends: a finalizer may catch it
                _raise_in(ctypes.c_ulong(_running.thread), ctypes.py_object(TooSlow))


class Pattern:
    """A pattern of the regex module that does not match beyond the deadline."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.compiled, name)
        if name not in MATCHES:
            return method
        bounded = functools.partial(_match, method)
        setattr(self, name, bounded)
        return bounded


def _match(method: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
    args = tuple(arg.compiled if isinstance(arg, Pattern) else arg for arg in args)
    if _running is None:
        return method(*args, timeout=timeout, **kwargs)
    left = max(0.001, _running.left())
    if timeout is not None and timeout < left:
        return method(*args, timeout=timeout, **kwargs)
    try:
        return method(*args, timeout=left, **kwargs)
    except TimeoutError:
        raise TooSlow from None


class Regex:
    """The regex module with bounded matches."""

    def __getattr__(self, name: str) -> Any:
        return functools.partial(_match, getattr(regex, name)) if name in MATCHES else getattr(regex, name)

    def compile(self, *args: Any, **kwargs: Any) -> Pattern:
        return Pattern(regex.compile(*args, **kwargs))


REGEX = Regex()


def bound_patterns() -> None:
    """Bound the matches of all modules of parsers that are imported."""
    for name, module in modules():
        _bound(module)
        for each in list(vars(module).values()):
            if isinstance(each, type) and each.__module__ == name:
                _bound(each)


def modules() -> list[tuple[str, Any]]:
    """Return the imported modules of vLLM's parsers with their names."""
    return [(name, module) for name, module in sys.modules.items() if name.startswith(PACKAGES)]


def _bound(namespace: Any) -> None:
    for name, value in list(vars(namespace).items()):
        if isinstance(value, regex.Pattern):
            setattr(namespace, name, Pattern(value))
        elif value is regex:
            setattr(namespace, name, REGEX)


class Bounded:
    """Mixin for a vLLM Parser that gives an answer as plain text when its budget is used up."""

    _names = ""
    """Settings that select the parsers."""
    _budget: Budget | None = None
    _slow = False
    _slow_pieces = 0
    _resume = 0.0
    _reasoning_tokens = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._text = ""  # held until _resume
        self._ids: list[int] = []
        self._unsent = ""  # was parsed since the parser returned something
        self._finished = True

    def parse(self, model_output: str, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse an answer, or return all of it as content."""
        tokens = kwargs.get("model_output_token_ids", ())
        budget = self._use(request, max(len(model_output), TOKEN_CHARACTERS * len(tokens)))
        started = time.thread_time()
        try:
            if budget.left() <= 0:
                raise TooSlow
            parse = functools.partial(super().parse, model_output, request, *args, **kwargs)  # type: ignore[misc]
            return within(budget.left(), parse)
        except TooSlow:
            self._warn(f"an answer of {len(model_output)} characters; it is returned as plain text")
            return None, model_output, None
        finally:
            budget.seconds += time.thread_time() - started

    def parse_delta(
        self, delta_text: str, delta_token_ids: list[int], request: Any, *args: Any, finished: bool, **kwargs: Any
    ) -> Any:
        """Parse a piece of a stream. After a slow one, hold pieces for a while. Over budget, return text as content."""
        from vllm.entrypoints.generate.base.protocol import DeltaMessage

        self._finished = finished
        text, ids = self._text + delta_text, self._ids + delta_token_ids
        if not finished and time.monotonic() < self._resume:
            self._text, self._ids = text, ids
            return None
        self._text, self._ids = "", []
        if self._slow:
            return DeltaMessage(content=text) if text else None
        budget = self._use(request, len(text))
        self._unsent += text
        started = time.thread_time()
        try:
            parse = functools.partial(super().parse_delta, text, ids, request, *args, finished=finished, **kwargs)  # type: ignore[misc]
            message = within(budget.left() + FREE_S, parse)
        except TooSlow:
            self._slow = True
            self._warn(f"an answer of {budget.characters} characters; the rest is sent as plain text")
            return DeltaMessage(content=self._unsent)
        finally:
            took = time.thread_time() - started
            budget.seconds += max(0.0, took - FREE_S)
            self._slow_pieces = self._slow_pieces + 1 if took > SLOW_S else 0
            if self._slow_pieces >= SLOW_PIECES:  # not for a single one: some parsers lose text of longer pieces
                self._resume = time.monotonic() + min(PAUSE * took, MAX_PAUSE_S)
        if message is not None:
            self._unsent = ""
        return message

    def count_reasoning_tokens(self, token_ids: Any) -> int:
        """Return the number of reasoning tokens. That of a stream is counted again when a piece of it is parsed."""
        if self._finished or not self._text:
            try:
                count = functools.partial(super().count_reasoning_tokens, token_ids)  # type: ignore[misc]
                self._reasoning_tokens = within(MAX_S, count)
            except TooSlow:
                self._warn(f"the reasoning in {len(token_ids)} tokens, which is not counted")
        return self._reasoning_tokens

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        """Return whether the reasoning of the last turn ends in these tokens: those of a prompt, or of an answer.

        vLLM also finds the reasoning of earlier turns, which templates repeat before the result of a tool. It would
        then apply the grammar of strict tools to the new reasoning, and return streamed reasoning as content.
        """
        turn = last_turn(input_ids, self.model_tokenizer.eos_token_id)  # type: ignore[attr-defined]
        try:
            return within(MAX_S, functools.partial(super().is_reasoning_end, turn))  # type: ignore[misc]
        except TooSlow:
            self._warn(f"the reasoning in {len(input_ids)} tokens, which counts as open")
            return False

    def _use(self, request: Any, characters: int) -> Budget:
        if self._budget is None:
            self._budget = _budgets.setdefault(id(request), Budget(request))
        self._budget.characters += characters
        return self._budget

    def _warn(self, work: str) -> None:
        log.warning(f"{self._names} took too long for {work}")


def last_turn(token_ids: list[int], eos_id: int | None) -> list[int]:
    """Return the tokens after the last end of a turn, but for an end that is the last token."""
    earlier = token_ids[-2::-1]
    return token_ids[len(earlier) - earlier.index(eos_id) :] if eos_id in earlier else token_ids


def install() -> None:
    """Bound all parsers that are made from now on in this process."""
    from vllm.parser import ParserManager
    from vllm.parser.engine.incremental_lexer import IncrementalLexer
    from vllm.parser.engine.streaming_parser_engine import StreamingParserEngine
    from vllm.parser.harmony import HarmonyParser

    threading.Thread(target=_watch, daemon=True, name="parsing watchdog").start()
    deepseek_calls.install()
    IncrementalLexer.feed = _in_slices(IncrementalLexer.feed)
    StreamingParserEngine.feed = _merging(StreamingParserEngine.feed)
    read_prompts_once()
    HarmonyParser._poll_completed_message = _forgetting(HarmonyParser._poll_completed_message)
    ParserManager.get_parser = _bounding(ParserManager.get_parser)


def read_prompts_once() -> None:
    """Let the parsers of Qwen3 and Seed-OSS read each token of a prompt once. The engine's process also does this."""
    from vllm.parser.qwen3 import Qwen3Parser

    Qwen3Parser.is_reasoning_end = _reading_once(Qwen3Parser.is_reasoning_end)


def _bounding(get_parser: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_parser)
    def get_bounded(
        tool_parser_name: str | None = None, reasoning_parser_name: str | None = None, **kwargs: Any
    ) -> Any:
        kind = get_parser(tool_parser_name, reasoning_parser_name, **kwargs)
        if kind is None:
            return None
        bound_patterns()
        names = " and ".join(
            f'{what} = "{name}"'
            for what, name in (("tool_parser", tool_parser_name), ("reasoning_parser", reasoning_parser_name))
            if name
        )
        return type(kind.__name__, (Bounded, kind), {"_names": names})

    return get_bounded


def _in_slices(feed: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's IncrementalLexer.feed in linear time."""

    @functools.wraps(feed)
    def feed_in_slices(self: Any, text: str, token_texts: tuple[str, ...] = (), token_count: int = 0) -> list[Any]:
        if len(text) <= SLICE:
            return feed(self, text, token_texts, token_count)
        counts = self._char_token_counts(text, token_texts, token_count)
        tokens = []
        for start in range(0, len(text), SLICE):
            self.buffer += text[start : start + SLICE]
            self._token_counts += counts[start : start + SLICE]
            tokens += self._drain()
        return tokens

    return feed_in_slices


def _merging(feed: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's StreamingParserEngine.feed with adjacent chunks as one: arguments are parsed again for each."""
    from vllm.parser.engine.events import EventType, SemanticEvent

    chunks = (EventType.ARG_VALUE_CHUNK, EventType.TEXT_CHUNK, EventType.REASONING_CHUNK)

    @functools.wraps(feed)
    def feed_and_merge(self: Any, delta_text: str, delta_token_ids: Any) -> list[Any]:
        events = feed(self, delta_text, delta_token_ids)
        if len(delta_text) <= SLICE:
            return events
        merged: list[Any] = []
        for (kind, index), group in itertools.groupby(events, key=lambda event: (event.type, event.tool_index)):
            if kind in chunks:
                parts = list(group)
                value, count = "".join(part.value for part in parts), sum(part.token_count for part in parts)
                merged.append(SemanticEvent(kind, value, index, count))
            else:
                merged += group
        return merged

    return feed_and_merge


def _reading_once(is_reasoning_end: Callable[..., bool]) -> Callable[..., bool]:
    """Return Qwen3Parser.is_reasoning_end in linear time: only a call after the last end of a call ends the reasoning.

    It looks for an end after each call. Prompts are tokens, too.
    """
    from vllm.parser.engine.parser_engine import ParserEngine

    @functools.wraps(is_reasoning_end)
    def is_ended(self: Any, input_ids: list[int]) -> bool:
        if self._tool_call_end_token_id not in input_ids:
            return is_reasoning_end(self, input_ids)
        after = input_ids[len(input_ids) - input_ids[::-1].index(self._tool_call_end_token_id) :]
        return ParserEngine.is_reasoning_end(self, input_ids) or (bool(after) and is_reasoning_end(self, after))

    return is_ended


def _forgetting(poll: Callable[..., Any]) -> Callable[..., Any]:
    """Return HarmonyParser._poll_completed_message with a parser for each message: it reads all for each token."""
    from openai_harmony import StreamableParser
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    @functools.wraps(poll)
    def poll_and_forget(self: Any) -> Any:
        message = poll(self)
        if message is not None:
            self._parser = StreamableParser(get_encoding(), role=None)  # which expects the start of a message
            self._num_processed_messages = 0
        return message

    return poll_and_forget
