"""Compiles grammars in child processes with limits on CPU time and memory.

llguidance limits the time of a step, but not that of compiling: a `multipleOf` of 15485863 takes minutes and gigabytes,
and a thread cannot be stopped. So this program, which has only the vocabulary in memory, forks for each grammar.

It reads a line of JSON with a `Vocabulary`, then one `{"id", "grammar"}` per line, and writes `{"id", "error"}`.
"""

import contextlib
import json
import os
import re
import resource
import selectors
import signal
import sys
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer
from llguidance._lib import LLParserLimits
from llguidance._tokenizer import TokenizerWrapper

CPU_TIME_S = 0.3  # legitimate schemas take 1 to 50 ms
MEMORY = 2 * 2**30  # bytes of address space
STEP_ITEMS = 5000  # of the parser per step. The default of 50,000 takes 0.3 s, and 5,000 at most 0.13 s.
MAX_ERROR = 500  # characters
INVALID = "the schema or grammar of the answer cannot be used: "
TOO_COMPLEX = "the schema or grammar of the answer is too complex; simplify its patterns, numbers and alternatives"
COMPLEX = re.compile("fuel|limit|too many|too large|max is", re.IGNORECASE)  # in llguidance's errors


class Vocabulary(NamedTuple):
    """The vocabulary of a model's tokenizer."""

    tokens: list[bytes]
    special: list[int]
    """Numbers of the special tokens."""
    eos: list[int]
    """Numbers of the tokens that end an answer."""

    def encode(self) -> bytes:
        """Return a line of JSON."""
        return json.dumps(self._replace(tokens=[token.decode("latin-1") for token in self.tokens])).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "Vocabulary":
        """Return the vocabulary that `encode` returned as a line."""
        tokens, special, eos = json.loads(line)
        return cls([token.encode("latin-1") for token in tokens], special, eos)


def limits(*, verbose_errors: bool) -> LLParserLimits:
    """Return the limits of each step of a grammar. Verbose errors quote the answer."""
    return LLParserLimits(step_max_items=STEP_ITEMS, verbose_errors=verbose_errors)


def compile_error(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """Return why a grammar cannot be used, or None."""
    matcher = LLMatcher(tokenizer, grammar, limits=limits(verbose_errors=True), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    error, _, _ = matcher.get_error().partition("\n<state>")
    if not error:
        return None
    if error.startswith("NoExtension"):
        return f"{INVALID}no text matches it"
    return TOO_COMPLEX if COMPLEX.search(error) else f"{INVALID}{error[:MAX_ERROR]}"


class _Tokenizer:
    """Gives llguidance a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids, [self.eos_token_id, *_] = vocabulary
        self.bos_token_id = None
        self.greedy: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        return self.greedy.greedy_tokenize(text.decode(errors="replace")) if self.greedy else []


def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    """Return llguidance's tokenizer for a vocabulary. It tokenizes text greedily, without the model's merges."""
    wrapped = _Tokenizer(vocabulary)
    tokenizer = LLTokenizer(TokenizerWrapper(wrapped), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos)
    wrapped.greedy = tokenizer
    return tokenizer


def _fork(tokenizer: LLTokenizer, grammar: str) -> int:
    """Compile a grammar in a child process. Return a pipe with `+` and the error, or with nothing if it was killed."""
    ours, theirs = os.pipe()
    if os.fork():
        os.close(theirs)
        return ours
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, CPU_TIME_S)  # SIGPROF ends the process
        os.write(theirs, b"+" + (compile_error(tokenizer, grammar) or "").encode())
    finally:
        os._exit(0)


def main() -> None:
    """Answer requests until standard input ends."""
    incoming = sys.stdin.fileno()
    tokenizer: LLTokenizer | None = None
    numbers: dict[int, int] = {}  # the ids of the requests, by the pipes of their processes
    unread = b""
    with selectors.DefaultSelector() as selector:
        selector.register(incoming, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != incoming:
                    selector.unregister(key.fd)
                    _answer(numbers.pop(key.fd), _result(key.fd))
                    continue
                if not (received := os.read(incoming, 2**20)):
                    return
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    if tokenizer is None:
                        tokenizer = tokenizer_of(Vocabulary.decode(line))
                        continue
                    request = json.loads(line)
                    pipe = _fork(tokenizer, request["grammar"])
                    numbers[pipe] = request["id"]
                    selector.register(pipe, selectors.EVENT_READ)


def _result(pipe: int) -> str | None:
    """Return the error that a process wrote before it ended, or None."""
    written = os.read(pipe, 4 * MAX_ERROR).decode(errors="replace")
    os.close(pipe)
    os.wait()
    return (written[1:] or None) if written else TOO_COMPLEX


def _answer(number: int, error: str | None) -> None:
    print(json.dumps({"id": number, "error": error}), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
