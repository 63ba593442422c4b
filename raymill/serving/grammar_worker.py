"""Compiles schemas, regular expressions and grammars in child processes with limits on CPU time and memory.

llguidance limits the time of a step, but not that of compiling: a `multipleOf` of 15485863 takes minutes and gigabytes,
and a thread cannot be stopped. So this program, which has only the vocabulary in memory, forks for each request.

It reads a line of JSON with a `Vocabulary`, then one `{"id", "kind", "text"}` per line. It writes `{"id", "grammar"}`
with llguidance's grammar, or `{"id", "error"}`.
"""

import contextlib
import json
import os
import re
import resource
import selectors
import signal
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from raymill.serving import json_schemas, structural_tags

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

    @property
    def special_names(self) -> dict[str, int]:
        """The number of each special token."""
        return {self.tokens[number].decode(errors="replace"): number for number in self.special}

    def encode(self) -> bytes:
        """Return a line of JSON."""
        return json.dumps([[token.decode("latin-1") for token in self.tokens], *self[1:]]).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "Vocabulary":
        """Return the vocabulary that `encode` returned as a line."""
        tokens, special, eos = json.loads(line)
        return cls([token.encode("latin-1") for token in tokens], special, eos)


def limits(*, verbose_errors: bool) -> LLParserLimits:
    """Return the limits of each step of a grammar. Verbose errors quote the answer."""
    return LLParserLimits(step_max_items=STEP_ITEMS, verbose_errors=verbose_errors)


def grammar_of(kind: str, text: str, special: Mapping[str, int]) -> str:
    """Return llguidance's grammar for a structured output.

    Args:
        kind: the name of one of vLLM's StructuredOutputOptions.
        text: what `get_structured_output_key` of vLLM returns for it.
        special: number of each special token.

    Raises:
        ValueError: the schema, expression, grammar or tag is invalid.
    """
    match kind:
        case "STRUCTURAL_TAG":
            return structural_tags.to_grammar(text, special)
        case "JSON":
            return LLMatcher.grammar_from_json_schema(json_schemas.prepare(json.loads(text)))
        case "JSON_OBJECT":
            return LLMatcher.grammar_from_json_schema({"type": "object"} | json_schemas.OPTIONS)
        case "REGEX":
            return grammar_from("lark", f"start: {structural_tags.regex(text)}\n")
        case "CHOICE":
            return grammar_from("choice", text)
        case "GRAMMAR":
            return grammar_from("grammar", text)
    raise ValueError(f"there is no kind {kind!r}")


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


def _compiled(tokenizer: LLTokenizer, special: Mapping[str, int], kind: str, text: str) -> dict[str, str]:
    """Return the answer to a request."""
    try:
        grammar = grammar_of(kind, text, special)
    except Exception as error:  # libraries raise many kinds for invalid grammars
        return {"error": f"{INVALID}{str(error)[:MAX_ERROR]}"}
    error = compile_error(tokenizer, grammar)
    return {"error": error} if error else {"grammar": grammar}


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


class _Child:
    """A process that answers one request."""

    def __init__(self, number: int, pipe: int) -> None:
        self.number = number
        self.pipe = pipe
        self._written = b""

    def read(self) -> bool:
        """Read from the pipe. Return whether the process has ended."""
        received = os.read(self.pipe, 2**20)
        self._written += received
        return not received

    def answer(self) -> str:
        """Return the line with the answer. A process that a limit has ended wrote none."""
        os.close(self.pipe)
        os.wait()
        found = json.loads(self._written) if self._written else {"error": TOO_COMPLEX}
        return json.dumps({"id": self.number} | found)


def _fork(tokenizer: LLTokenizer, special: Mapping[str, int], request: Any) -> _Child:
    """Answer a request in a child process."""
    ours, theirs = os.pipe()
    if os.fork() == 0:
        _write_answer(theirs, tokenizer, special, request)
    os.close(theirs)
    return _Child(request["id"], ours)


def _write_answer(pipe: int, tokenizer: LLTokenizer, special: Mapping[str, int], request: Any) -> None:
    """Compile, write the answer to the pipe, and end this process."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, CPU_TIME_S)  # SIGPROF ends the process
        answer = json.dumps(_compiled(tokenizer, special, request["kind"], request["text"])).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        with open(pipe, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)


def main() -> None:
    """Answer requests until standard input ends."""
    incoming = sys.stdin.fileno()
    tokenizer: LLTokenizer | None = None
    special: dict[str, int] = {}
    unread = b""
    with selectors.DefaultSelector() as selector:
        selector.register(incoming, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                child: _Child | None = key.data
                if child:
                    if child.read():
                        selector.unregister(child.pipe)
                        print(child.answer(), flush=True)
                    continue
                if not (received := os.read(incoming, 2**20)):
                    return
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    if tokenizer is None:
                        vocabulary = Vocabulary.decode(line)
                        tokenizer, special = tokenizer_of(vocabulary), vocabulary.special_names
                        continue
                    child = _fork(tokenizer, special, json.loads(line))
                    selector.register(child.pipe, selectors.EVENT_READ, child)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
