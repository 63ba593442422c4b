"""Convert messages and tools of published data sets to the form in which vLLM passes them to chat templates."""

import json
import re
from typing import Any

from raymill.data.examples import TEXT_PARTS, BadRow, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
PLAIN_KEYS = {"role", "content"}
INLINE_REASONING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # different servers and templates use different names


def normalize_messages(messages: object) -> list[Message]:
    """Return messages in the form that templates read: each has a known role, and text or tool calls.

    Raises:
        BadRow: a message is malformed.
    """
    return [_normalize_message(message) for message in require_objects(messages, "messages")]


def separate_reasoning(message: Message) -> Message:
    """Return a message with the reasoning from <think> tags at the start of its answer in `reasoning_content`."""
    if message["role"] != "assistant" or "reasoning_content" in message:
        return message
    found = INLINE_REASONING.fullmatch(message["content"])
    if not found or not (found[2].strip() or message.get("tool_calls")):
        return message
    reasoning, answer = found[1].strip(), found[2].strip()
    separated: Message = {"role": "assistant", "content": answer}
    if reasoning:
        separated["reasoning_content"] = reasoning
    return separated | {key: message[key] for key in message if key not in PLAIN_KEYS}


def normalize_tools(tools: object) -> list[dict[str, Any]]:
    """Return tools with their keys in vLLM's order, and null for each missing key.

    Raises:
        BadRow: a tool is malformed.
    """
    tools = decode_json(tools or [], "tools") or []  # the JSON text "null" also means no tools
    return [_normalize_tool(tool) for tool in require_objects(tools, "tools")]


def decode_json(value: object, name: str) -> Any:
    """Return `value`, decoded as JSON if it is text. `name` is for the error message.

    Raises:
        BadRow: the text is not valid JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadRow(f"{name} is text but not valid JSON") from None


def require_text(value: object) -> str:
    """Return `value`, which must be text.

    Raises:
        BadRow: `value` is not text.
    """
    if not isinstance(value, str):
        raise BadRow("a value that is not text")
    return value


def require_objects(value: object, name: str) -> list[dict[str, Any]]:
    """Return `value`, which must be a list of objects. `name` is for the error message.

    Raises:
        BadRow: `value` has another shape, which the message names.
    """
    if not isinstance(value, list):
        raise BadRow(f"{name} is {_shape(value)}, not a list of objects")
    for item in value:
        if not isinstance(item, dict):
            raise BadRow(f"{name} is a list with {_shape(item)}, not a list of objects")
    return value


def _shape(value: object) -> str:
    """Return what a value of JSON or parquet is, for an error message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "an object of lists" if any(isinstance(item, list) for item in value.values()) else "an object"
    return "a value that cannot be read"


def _normalize_message(message: Message) -> Message:
    if message.keys() == PLAIN_KEYS and isinstance(message["content"], str) and message["role"] in ROLES:
        return {"role": message["role"], "content": message["content"]}  # a fast path for most messages
    # parquet stores a missing key as null, which templates must not see
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") not in ROLES:
        raise BadRow(f"a message with an unknown role; known: {', '.join(ROLES)}")
    if message.get("function_call"):
        raise BadRow("function_call is deprecated: use tool_calls")
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise BadRow("tool_calls is not a list")
    calls = [_normalize_call(call) for call in calls]
    parts = _text_parts(message.pop("content", "" if calls else None))
    thoughts = [message.pop(name) for name in REASONING_KEYS if name in message]
    reasoning = thoughts[0] if thoughts else None
    if any(other != reasoning for other in thoughts):
        raise BadRow(f"a message with two different reasonings; keep one of {', '.join(REASONING_KEYS)}")
    # as vLLM joins them for a template that does not read parts
    normalized: Message = {"role": message.pop("role"), "content": "\n".join(filter(None, parts))}
    if len(parts) > 1:
        normalized[TEXT_PARTS] = parts
    if reasoning:
        normalized["reasoning_content"] = require_text(reasoning)
    if calls:
        normalized["tool_calls"] = calls
    if "weight" in message:
        message["weight"] = _normalize_weight(message["weight"])
    return normalized | {key: message[key] for key in sorted(message) if key != TEXT_PARTS}


def _normalize_weight(weight: object) -> int:
    """Return 0 or 1. Some data sets store weights as text, and a column with nulls stores them as floats."""
    for value in (0, 1):
        if weight == value or weight == str(value):
            return value
    raise BadRow("a message with a weight that is neither 0 nor 1")


def _text_parts(content: object) -> list[str]:
    """Return the texts of a message."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        other_types = {str(part.get("type")) for part in content} - {"text"}
        if other_types:
            raise BadRow(f"a message with parts that are not text: {', '.join(sorted(other_types))}")
        return [require_text(part.get("text")) for part in content]
    if not isinstance(content, str):
        raise BadRow("a message with content that is not text")
    return [content]


def _normalize_call(call: object) -> dict[str, Any]:
    """Return a tool call as vLLM passes it to templates: arguments as an object, keys in vLLM's order."""
    if not isinstance(call, dict):
        raise BadRow("a tool call that is not an object")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call without a function name")
    arguments = decode_json(function.get("arguments") or {}, "the arguments of a tool call")
    if not isinstance(arguments, dict):
        raise BadRow("a tool call with arguments that are not an object")
    call_id = {"id": call["id"]} if call.get("id") else {}
    return call_id | {"function": {"arguments": arguments, "name": function["name"]}, "type": "function"}


def _normalize_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)  # some data sets list the bare functions
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool without a name")
    known = {key: function.get(key) for key in ("name", "description", "parameters")}
    return {"type": "function", "function": known | {key: function[key] for key in function if key != "type"}}
