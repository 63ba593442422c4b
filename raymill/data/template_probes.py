"""Small conversations that show what a chat template renders."""

from collections.abc import Iterator
from typing import Any

from raymill.data.examples import Conversation, Message

QUESTION: Message = {"role": "user", "content": "probe-question"}
ANSWER: Message = {"role": "assistant", "content": "probe-answer"}
NEXT: Message = {"role": "user", "content": "probe-next"}
NEXT_ANSWER: Message = {"role": "assistant", "content": "probe-last"}
THINKING: Message = {"role": "assistant", "reasoning_content": "probe-reasoning", "content": "probe-answer"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",  # Mistral accepts only ids of nine letters or digits
            "function": {"arguments": {"probe_key": "probe-value"}, "name": "probe_call"},
            "type": "function",
        }
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "name": "probe_call", "content": "probe-result"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_call",
        "description": "probe-description",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "a key"}}},
    },
}
FEATURES: dict[str, tuple[Conversation, tuple[str, ...]]] = {
    "a system message": (
        Conversation([{"role": "system", "content": "probe-system"}, QUESTION, ANSWER]),
        ("probe-system",),
    ),
    "a developer message": (
        Conversation([{"role": "developer", "content": "probe-system"}, QUESTION, ANSWER]),
        ("probe-system",),
    ),
    "reasoning": (Conversation([QUESTION, THINKING]), ("probe-reasoning", "probe-answer")),
    "tools": (Conversation([QUESTION, ANSWER], [TOOL]), ("probe-description",)),
    "tool calls": (Conversation([QUESTION, CALL], [TOOL]), ("probe_call", "probe_key", "probe-value")),
    "tool calls with text": (
        Conversation([QUESTION, CALL | {"content": "probe-answer"}], [TOOL]),
        ("probe-answer", "probe_call", "probe-value"),
    ),
    "tool results": (Conversation([QUESTION, CALL, RESULT, ANSWER], [TOOL]), ("probe-result", "probe-answer")),
}
"""Optional parts of a conversation, each with a probe and the strings that the rendered probe must contain."""


def features(conversation: Conversation) -> Iterator[str]:
    """Yield the keys of FEATURES that apply to a conversation."""
    if conversation.tools:
        yield "tools"
    for message in conversation.messages:
        match message["role"]:
            case "system" | "developer" | "tool" as role:
                yield "tool results" if role == "tool" else f"a {role} message"
        if message.get("reasoning_content"):
            yield "reasoning"
        if message.get("tool_calls"):
            yield "tool calls with text" if message.get("content") else "tool calls"
