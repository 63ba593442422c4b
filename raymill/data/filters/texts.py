"""The text of a training example that filters see, and how filters change it."""

import json
from collections.abc import Callable
from typing import Any

from raymill.data.examples import Completion, Conversation, Example
from raymill.data.filters.options import Scope
from raymill.data.messages import REASONING_KEYS

ROLES = {"turns": {"user", "assistant"}, "answers": {"assistant"}}
FIXED = {"role", "tool_call_id"}
FIXED_IN_CALLS = {"type", "id"}
"""Keys of messages, and of calls of tools, whose values other parts of a row refer to."""
SPOKEN = ("content", *REASONING_KEYS)


def parts(example: Example, scope: Scope) -> list[str]:
    """Return the texts of an example, one per message."""
    if isinstance(example, Completion):
        return [example.completion] if scope == "answers" else [example.prompt, example.completion]
    roles = ROLES.get(scope)
    found = [_spoken(message) for message in example.messages if roles is None or message["role"] in roles]
    return [*found, json.dumps(example.tools, ensure_ascii=False)] if scope == "all" and example.tools else found


def join(found: list[str]) -> str:
    return "\n".join(part for part in found if part)


def replace(example: Example, change: Callable[[str], str]) -> Example:
    """Return an example with all its texts changed, also those in tools and in arguments of calls."""
    if isinstance(example, Completion):
        return Completion(change(example.prompt), change(example.completion))
    messages = [_replace_but(message, FIXED, change) for message in example.messages]
    return Conversation(messages, replace_all(example.tools, change))


def _spoken(message: dict[str, Any]) -> str:
    texts = [message[key] for key in SPOKEN if isinstance(message.get(key), str)]
    calls = message.get("tool_calls")
    return "\n".join([*texts, json.dumps(calls, ensure_ascii=False)] if calls else texts)


def replace_all(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with all its texts changed, also the keys of objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        changed: dict[str, Any] = {}
        for key, item in value.items():
            name, number = change(key), 1
            while name in changed:  # two addresses become one placeholder
                number += 1
                name = f"{change(key)} {number}"
            changed[name] = replace_all(item, change)
        return changed
    return [replace_all(item, change) for item in value] if isinstance(value, list) else value


def _replace_but(message: dict[str, Any], fixed: set[str], change: Callable[[str], str]) -> dict[str, Any]:
    changed = {key: value if key in fixed else replace_all(value, change) for key, value in message.items()}
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_replace_but(call, FIXED_IN_CALLS, change) for call in calls]
    return changed
