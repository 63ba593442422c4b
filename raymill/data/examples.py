"""Training examples, each from one row, and their encoding as JSON."""

import json
from typing import Any, NamedTuple

import msgspec

Message = dict[str, Any]
"""A message in the form that chat templates read."""
TEXT_PARTS = "text_parts"
"""A key of messages with several text parts, for templates that read parts. `content` has the parts as one text."""


class BadRow(Exception):
    """A row cannot be used. The message says why, in the same words for all rows with this problem."""


class Conversation(NamedTuple):
    """Messages and tools in the form that chat templates read."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


class Completion(NamedTuple):
    """A prompt, which is not trained, and its completion, which is. No chat template is applied."""

    prompt: str
    completion: str


class Pair(NamedTuple):
    """Two answers to the same prompt, of which one is preferred. Only the answers are trained."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion


class Rated(NamedTuple):
    """An answer that somebody found good or bad. Only the answer is trained."""

    answer: Conversation | Completion
    is_good: bool


Example = Conversation | Completion | Pair | Rated


def decode(text: bytes) -> Any:
    """Return the value of a JSON text, as `json.loads` does, but in a third of the time.

    Raises:
        ValueError, RecursionError: the text is not JSON, or is nested too deeply.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(text)  # also reads NaN, infinities, halves of surrogate pairs and a byte order mark


def canonical_json(value: object) -> bytes:
    """Return a value as JSON that depends only on its content, not on the order of keys.

    Raises:
        BadRow: a text in `value` is not valid Unicode, because it contains half of a surrogate pair.
    """
    return _to_bytes(json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str))


def to_json(example: Example) -> bytes:
    """Return an example as JSON, which is the same for a parquet row as for a line of JSONL.

    Tool arguments and schemas keep the order of their keys.

    Raises:
        BadRow: see `canonical_json`.
    """
    return _to_bytes(_encode(_fields(example)))


def _fields(example: Example) -> dict[str, Any]:
    if isinstance(example, Pair):
        return {"chosen": _fields(example.chosen), "rejected": _fields(example.rejected)}
    if isinstance(example, Rated):
        return {**_fields(example.answer), "label": example.is_good}
    return {name: value for name, value in example._asdict().items() if value}


def from_json(row: bytes) -> Example:
    """Return the example that `to_json` encoded."""
    fields = decode(row)
    if "chosen" in fields:
        return Pair(_from_fields(fields["chosen"]), _from_fields(fields["rejected"]))
    if "label" in fields:
        return Rated(_from_fields(fields), fields["label"])
    return _from_fields(fields)


def _from_fields(fields: dict[str, Any]) -> Conversation | Completion:
    if "messages" in fields:
        return Conversation(fields["messages"], fields.get("tools"))
    return Completion(fields.get("prompt", ""), fields["completion"])


def _to_bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadRow("text that is not valid Unicode") from None


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode  # built once, not per row
