"""Training examples: what one row holds, and how it is encoded as JSON."""

import json
from typing import Any, NamedTuple

Message = dict[str, Any]
"""A message in the form that chat templates read."""


class BadRow(Exception):
    """A row cannot be used. The message is the reason, in the same words for all rows with this problem."""


class Conversation(NamedTuple):
    """Messages and tools in the form that chat templates read."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


class Completion(NamedTuple):
    """A prompt, which is not trained, and its completion, which is. No chat template is applied."""

    prompt: str
    completion: str


Example = Conversation | Completion


def canonical_json(value: object) -> bytes:
    """Return a value as JSON that depends only on its content, not on the order of its keys.

    Raises:
        BadRow: the text is not valid Unicode: it contains half of a surrogate pair.
    """
    return _dump(value, sort_keys=True)


def to_json(example: Example) -> bytes:
    """Return an example as JSON, which is the same for a parquet row as for a line of JSONL.

    Tool arguments and schemas keep the order of their keys.

    Raises:
        BadRow: see `canonical_json`.
    """
    return _dump({name: value for name, value in example._asdict().items() if value}, sort_keys=False)


def from_json(row: bytes) -> Example:
    """Return the example that `to_json` encoded."""
    fields = json.loads(row)
    if "messages" in fields:
        return Conversation(fields["messages"], fields.get("tools"))
    return Completion(fields.get("prompt", ""), fields["completion"])


def _dump(value: object, *, sort_keys: bool) -> bytes:
    text = json.dumps(value, sort_keys=sort_keys, ensure_ascii=False, separators=(",", ":"), default=str)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadRow("text that is not valid Unicode") from None
