"""The text of a training example that filters see, and how filters change it."""

import json
from collections.abc import Callable
from typing import Any

from raymill.data.examples import Completion, Conversation, Example, Pair, Rated
from raymill.data.filters.options import Scope
from raymill.data.messages import REASONING_KEYS

ROLES = {"turns": {"user", "assistant"}, "answers": {"assistant"}}
Change = Callable[[str], str]
"""Returns a changed text."""
FIXED = {"role", "tool_call_id"}
FIXED_IN_CALLS = {"type", "id"}
"""Keys of messages, and of calls of tools, whose values other parts of a row refer to."""
SPOKEN = ("content", *REASONING_KEYS)


def parts(example: Example, scope: Scope) -> list[str]:
    """Return the texts of an example, one per message."""
    if isinstance(example, Pair):
        return [*parts(example.chosen, scope), *parts(example.rejected, "answers")]
    if isinstance(example, Rated):
        return parts(example.answer, scope)
    if isinstance(example, Completion):
        return [example.completion] if scope == "answers" else [example.prompt, example.completion]
    roles = ROLES.get(scope)
    found = [_spoken(message) for message in example.messages if roles is None or message["role"] in roles]
    return [*found, json.dumps(example.tools, ensure_ascii=False)] if scope == "all" and example.tools else found


def join(found: list[str]) -> str:
    return "\n".join(part for part in found if part)


def replace(example: Example, change: Change, change_name: Change | None = None) -> Example:
    """Return an example with all its texts changed, also those in tools and in arguments of calls.

    `change_name` changes what must not read differently in two places: tools, names of functions, and keys.
    """
    change_name = change_name or change
    if isinstance(example, Pair):
        return Pair(*(replace(answer, change, change_name) for answer in example))  # type: ignore[arg-type]
    if isinstance(example, Rated):
        return Rated(replace(example.answer, change, change_name), example.is_good)  # type: ignore[arg-type]
    if isinstance(example, Completion):
        return Completion(*(replace_all(text, change, change_name) for text in example))
    messages = [_replace_but(message, FIXED, change, change_name) for message in example.messages]
    return Conversation(messages, replace_all(example.tools, change_name, change_name))


def _spoken(message: dict[str, Any]) -> str:
    texts = [message[key] for key in SPOKEN if isinstance(message.get(key), str)]
    calls = message.get("tool_calls")
    return "\n".join([*texts, json.dumps(calls, ensure_ascii=False)] if calls else texts)


def replace_all(value: Any, change: Change, change_name: Change) -> Any:
    """Return a value with all its texts and whole numbers changed, also those within a text that is JSON."""
    if isinstance(value, str):
        return _replace_in_json(value, change, change_name) if value.lstrip()[:1] in ("{", "[") else change(value)
    if isinstance(value, int) and not isinstance(value, bool):
        changed_number = change(str(value))
        return value if changed_number == str(value) else changed_number
    if isinstance(value, dict):
        changed: dict[str, Any] = {}
        for key, item in value.items():
            name, number = change_name(key), 1
            while name in changed:  # two addresses become one placeholder
                number += 1
                name = f"{change_name(key)} {number}"
            changed[name] = replace_all(item, change, change_name)
        return changed
    return [replace_all(item, change, change_name) for item in value] if isinstance(value, list) else value


def _replace_in_json(text: str, change: Change, change_name: Change) -> str:
    """Return a text changed as JSON if it is JSON: the letter of an escape such as \\n hides what follows."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return change(text)
    changed = replace_all(value, change, change_name)
    return text if changed == value else json.dumps(changed, ensure_ascii=False)


def _replace_but(message: dict[str, Any], fixed: set[str], change: Change, change_name: Change) -> dict[str, Any]:
    changed = {
        key: value if key in fixed else replace_all(value, change, change_name) for key, value in message.items()
    }
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_replace_but(call, FIXED_IN_CALLS, change, change_name) for call in calls]
    if (function := message.get("function")) and "name" in function:
        changed["function"]["name"] = change_name(function["name"])
    return changed
