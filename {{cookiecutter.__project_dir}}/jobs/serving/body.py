"""What the body of a request may hold before anything else reads it: its nesting, its text, its schemas, its prompts.

Each limit stands against a request that ended an engine, or kept all others waiting for seconds.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic_core import from_json

MAX_DEPTH = 64  # of lists and objects: the engine's serializer ran out of stack at 300, and the engine ended
# of a schema, grammar or regex, which block all requests while they are parsed: one of 17 k and 450 levels for 12.6 s
MAX_SCHEMA = 16 * 1024
MAX_REPEATS = 2000  # the sum of all bounds as in a{1,30}: their cost is quadratic, and {1,30000} alone took 85 s
INTERNAL = frozenset({"kv_transfer_params", "ec_transfer_params"})  # one vLLM tells another; clients have no say
BOUNDS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
NO_OBJECT = "the body must be a JSON object"


class InvalidBody(Exception):
    """A body that nothing else should read: what OpenAI's error says of it."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_json") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = 400


class Body(NamedTuple):
    """A body that may be read."""

    raw: bytes
    """As it came, but for fields that only an internal peer may send."""
    model: str | None
    """Name of the model asked for."""
    sequences: int
    """Sequences that the engine works on: prompts, times the answers to each."""


def inspect(raw: bytes) -> Body:
    """Return what a request asks for.

    Raises:
        InvalidBody: the body is no JSON object, is nested too deep, or holds half a surrogate pair, a schema that is
            too large, or an `n` that is no whole number.
    """
    asked = _parse(raw)
    if not isinstance(asked, dict):
        raise InvalidBody(NO_OBJECT)
    for param, text in _arguments(asked):
        _parse_inner(param, text)
    for param, schema in _schemas(asked):
        _check_schema(param, schema)
    if INTERNAL & asked.keys():
        raw = json.dumps({name: value for name, value in asked.items() if name not in INTERNAL}).encode()
    model = asked.get("model")
    return Body(raw, model if isinstance(model, str) else None, _sequences(asked))


def _parse(raw: bytes | str) -> Any:
    try:
        value = from_json(raw, allow_inf_nan=False)  # stops by itself at 200 levels
    except ValueError as error:
        raise _unreadable(raw, str(error)) from None
    brackets = (b"[", b"{") if isinstance(raw, bytes) else ("[", "{")
    if sum(map(raw.count, brackets)) > MAX_DEPTH and _is_deep(value):
        raise _too_deep()
    return value


def _unreadable(raw: bytes | str, reason: str) -> InvalidBody:
    if "recursion limit" in reason:
        return _too_deep()
    try:  # takes lone surrogates, so it can tell where they are
        param = next(_surrogates(json.loads(raw)), None)
    except RecursionError:
        return _too_deep()
    except ValueError:
        param = None
    if param is None:
        return InvalidBody(f"{NO_OBJECT}: {reason}")
    message = f"{param} holds half of a surrogate pair, which is no character: send both halves"
    return InvalidBody(message, param, "invalid_unicode")


def _too_deep() -> InvalidBody:
    message = f"the body is nested deeper than {MAX_DEPTH} levels: send flatter lists and objects"
    return InvalidBody(message, code="nested_too_deep")


def _is_deep(value: Any) -> bool:
    """Whether more than MAX_DEPTH lists and objects are inside each other: level by level, as recursion would end."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _values(outer) if type(inner) in (dict, list)]
        if not level:
            return False
    return True


def _values(outer: Any) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def _surrogates(body: Any) -> Iterator[str]:
    """The path of each text with a lone surrogate; of a key with one, the path of what holds it."""
    waiting = [("", body)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            if not _is_text(value):
                yield path
        elif isinstance(value, dict | list):
            named = value.items() if isinstance(value, dict) else enumerate(value)
            for name, inner in named:
                if not _is_text(str(name)):
                    yield path or "a field's name"
                else:
                    waiting.append((f"{path}.{name}" if path else str(name), inner))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _arguments(asked: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Arguments of the tool calls of earlier answers: texts that vLLM reads as JSON."""
    for place, message in _objects(asked.get("messages")):
        for number, call in _objects(message.get("tool_calls")):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield f"messages.{place}.tool_calls.{number}.function.arguments", function["arguments"]


def _objects(value: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    if isinstance(value, list):
        yield from ((number, each) for number, each in enumerate(value) if isinstance(each, dict))


def _parse_inner(param: str, text: str) -> Any:
    """Return what JSON in a text says; what is no JSON at all is None, as vLLM refuses it or does without."""
    try:
        return _parse(text)
    except InvalidBody as error:
        if error.code == "invalid_json":
            return None
        raise InvalidBody(f"in the JSON of {param}: {error.message}", param, error.code) from None


def _schemas(asked: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the answer has to look like, in each of the ways in which that can be said."""
    outputs = asked.get("structured_outputs")
    if isinstance(outputs, dict):
        for name, value in outputs.items():
            yield f"structured_outputs.{name}", value
    for name in ("response_format", "tools"):
        if name in asked:
            yield name, asked[name]


def _check_schema(param: str, schema: Any) -> None:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_SCHEMA:
        message = f"{param} has {len(text):,} characters, {MAX_SCHEMA:,} at most: send a smaller schema"
        raise InvalidBody(message, param, "schema_too_large")
    if isinstance(schema, str) and (inner := _parse_inner(param, schema)):  # JSON can hide braces behind escapes
        text = json.dumps(inner, ensure_ascii=False)
    repeats = sum(max(int(bound or 0) for bound in found) for found in BOUNDS.findall(text))
    if repeats > MAX_REPEATS:
        message = f"the repetitions in {param}, as in a{{1,30}}, add up to {repeats:,}, {MAX_REPEATS:,} at most"
        raise InvalidBody(f"{message}: use * or + for long ones", param, "schema_too_large")


def _sequences(asked: dict[str, Any]) -> int:
    """Return prompts times `n`. Completions have `prompt`, embeddings `input` or conversations in `messages`."""
    answers = asked.get("n")
    if answers is None:
        answers = 1
    if type(answers) is not int:  # vLLM would take "8" and 8.0 for 8
        raise InvalidBody("n must be a whole number", "n", "invalid_type")
    prompts = max(_prompts(asked.get(name)) for name in ("prompt", "prompt_embeds", "input", "messages"))
    return prompts * max(answers, 1)


def _prompts(value: Any) -> int:
    """How many a text, token ids, or a list of either are; a conversation is one."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return len(value)
    return 1
