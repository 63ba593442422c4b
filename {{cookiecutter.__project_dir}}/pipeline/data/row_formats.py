"""Read training rows in published formats: conversations, prompts with completions, or plain text.

The columns of a row decide its format. `preprocess` lists the columns that the format does not read.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pipeline.data.chat_template import Conversation, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
REASONING = ("reasoning_content", "reasoning", "thinking")  # servers and templates use all three
QUESTIONS = ("instruction", "question", "query", "prompt")
CONTEXTS = ("input", "context")
ANSWERS = ("response", "output", "answer", "completion", "target")


class BadRow(Exception):
    """A row cannot be trained. The text is the reason, the same for all rows of its kind."""


class Completion(NamedTuple):
    """A prompt, which is not trained, and a completion, which is. No chat template applies."""

    prompt: str
    completion: str


Example = Conversation | Completion
"""What one row holds."""


class Format(NamedTuple):
    """A row format."""

    name: str
    needs: tuple[tuple[str, ...], ...]
    """Required columns: one of each tuple."""
    takes: tuple[str, ...]
    """Optional columns."""
    read: Callable[[Mapping[str, Any]], Example]

    def fits(self, row: Mapping[str, Any]) -> bool:
        return all(any(row.get(name) is not None for name in names) for names in self.needs)

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(name for names in self.needs for name in names) | frozenset(self.takes)


# ---------------------------------------------------------------- from rows to examples


def example(row: Mapping[str, Any]) -> Example:
    """Return what a row holds.

    Raises:
        BadRow: no format fits the row, or the row is malformed.
    """
    found = format_of(row).read(row)
    if isinstance(found, Completion):
        if not found.completion.strip():
            raise BadRow("nothing to train: its text is empty")
        return found
    answers = [message for message in found.messages if message["role"] == "assistant"]
    if not answers:
        raise BadRow("no assistant turn")
    if not all(message["content"].strip() or message.get("tool_calls") for message in answers):
        raise BadRow("an empty assistant turn")
    if all(message.get("weight") == 0 for message in answers):
        raise BadRow("every assistant turn has weight 0")
    return found


def format_of(row: Mapping[str, Any]) -> Format:
    """Return the first of FORMATS that fits a row.

    Raises:
        BadRow: none fits.
    """
    found = next((one for one in FORMATS if one.fits(row)), None)
    if not found or found.needs[0] == ("prompt",):
        for unsupported, reason in UNSUPPORTED.items():
            if all(row.get(name) is not None for name in unsupported):
                raise BadRow(reason)
    if not found:
        raise BadRow(NO_FORMAT)
    return found


def _conversation(row: Mapping[str, Any]) -> Conversation:
    return _with_siblings(row, well_formed(_unpacked(row["messages"], "messages")))


def _sharegpt(row: Mapping[str, Any]) -> Conversation:
    turns = _unpacked(row["conversations"], "conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("conversations is not a list of objects")
    return _with_siblings(row, well_formed([_from_sharegpt(turn) for turn in turns]))


def _from_sharegpt(turn: Message) -> Message:
    speaker = turn.get("from")
    if speaker is None:
        return turn  # it has role and content
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise BadRow(f"a turn with an unknown `from`; known: {', '.join(SHAREGPT_ROLES)}")
    value = turn.get("value")
    message: Message = {"role": SHAREGPT_ROLES[speaker], "content": value}
    if speaker == "function_call":
        calls = _unpacked(value, "a function call")
        message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return message | {key: turn[key] for key in ("weight", *REASONING) if turn.get(key) is not None}


def _instruction(row: Mapping[str, Any]) -> Conversation:
    """Read Alpaca, Dolly, and question and answer: one exchange, after an optional `history`."""
    question, context, answer = (_first(row, names) for names in (QUESTIONS, CONTEXTS, ANSWERS))
    content = f"{_text(question)}\n\n{_text(context)}" if context else question
    history = _unpacked(row.get("history") or [], "history")
    try:
        past = [message for asked, said in history for message in (_user(asked), _assistant(said))]
    except (TypeError, ValueError):
        raise BadRow("history is not a list of pairs") from None
    return _with_siblings(row, well_formed([*past, _user(content), _assistant(answer)]))


def _completion(row: Mapping[str, Any]) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise BadRow("prompt and completion are neither texts nor lists of messages")
    asked = [one | {"weight": 0} if one["role"] == "assistant" else one for one in well_formed(prompt)]
    return _with_siblings(row, [*asked, *well_formed(completion)])


def _plain_text(row: Mapping[str, Any]) -> Completion:
    return Completion("", _text(row["text"]))


# ---------------------------------------------------------------- messages


def well_formed(messages: object) -> list[Message]:
    """Return messages in the shape that templates read: each has a known role, and text or tool calls.

    Raises:
        BadRow: a message is malformed.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRow("messages is not a list of objects")
    return [_message(message) for message in messages]


def _message(message: Message) -> Message:
    # parquet writes null for a missing key; templates must not see it
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") not in ROLES:
        raise BadRow(f"a message with an unknown role; known: {', '.join(ROLES)}")
    if message.get("function_call"):
        raise BadRow("function_call is deprecated: use tool_calls")
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise BadRow("tool_calls is not a list")
    calls = [_call(call) for call in calls]
    content = _content(message.pop("content", "" if calls else None))
    reasoning = next((message.pop(name) for name in REASONING if name in message), None)
    made: Message = {"role": message.pop("role"), "content": content}
    if reasoning:
        made["reasoning_content"] = _text(reasoning)
    if calls:
        made["tool_calls"] = calls
    return made | {key: message[key] for key in sorted(message) if key not in REASONING}


def _content(content: object) -> str:
    """Return the text of a message. Content parts are joined as in vLLM."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {str(part.get("type")) for part in content} - {"text"}
        if kinds:
            raise BadRow(f"a message with parts that are not text: {', '.join(sorted(kinds))}")
        content = "\n".join(_text(part.get("text")) for part in content)
    if not isinstance(content, str):
        raise BadRow("a message with content that is not text")
    return content


def _call(call: object) -> dict[str, Any]:
    """Return a tool call as vLLM passes it to templates: arguments as an object, keys in this order."""
    if not isinstance(call, dict):
        raise BadRow("a tool call that is not an object")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call without a function's name")
    arguments = _unpacked(function.get("arguments") or {}, "the arguments of a tool call")
    if not isinstance(arguments, dict):
        raise BadRow("a tool call with arguments that are not an object")
    name = {"id": call["id"]} if call.get("id") else {}
    return name | {"function": {"arguments": arguments, "name": function["name"]}, "type": "function"}


def _with_siblings(row: Mapping[str, Any], messages: list[Message]) -> Conversation:
    """Add the system prompt and the tools from the row's other columns."""
    if row.get("functions") is not None:
        raise BadRow("functions is deprecated: use tools")
    if system := row.get("system") or row.get("system_prompt"):
        if messages and messages[0]["role"] == "system":
            raise BadRow("two system prompts: a column and a message")
        messages = [{"role": "system", "content": _text(system)}, *messages]
    tools = _unpacked(row.get("tools") or [], "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools is not a list of objects")
    return Conversation(messages, [_tool(tool) for tool in tools] or None)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as vLLM passes it to templates: these keys first, with null for a missing one."""
    function = tool.get("function", tool)  # some data sets list the bare functions
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool without a name")
    known = {key: function.get(key) for key in ("name", "description", "parameters")}
    return {"type": "function", "function": known | {key: function[key] for key in function if key != "type"}}


def _unpacked(value: object, what: str) -> Any:
    """Decode a value that its column may hold as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadRow(f"{what} is text but not valid JSON") from None


def without_nulls(value: Any) -> Any:
    """Remove nulls from a parquet value: parquet adds them for keys that a row lacks."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _user(content: object) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: object) -> Message:
    return {"role": "assistant", "content": content}


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadRow("a column with a value that is not text")
    return value


# ---------------------------------------------------------------- formats

SIBLINGS = ("tools", "functions", "system", "system_prompt")
FORMATS = (
    Format("conversations", (("messages",),), SIBLINGS, _conversation),
    Format("ShareGPT conversations", (("conversations",),), SIBLINGS, _sharegpt),
    Format("prompts and completions", (("prompt",), ("completion",)), SIBLINGS, _completion),
    Format("instructions and answers", (QUESTIONS, ANSWERS), (*CONTEXTS, "history", *SIBLINGS), _instruction),
    Format("plain text", (("text",),), (), _plain_text),
)
UNSUPPORTED = {
    ("chosen", "rejected"): "a preference pair (chosen, rejected): this project does not do DPO",
    ("prompt", "completion", "label"): "a rated completion (label): this project does not do KTO",
}
COLUMNS = tuple(sorted({name for one in FORMATS for name in one.columns} | {name for n in UNSUPPORTED for name in n}))
NO_FORMAT = "no known columns"
WANTED = "messages, or instruction and response, or prompt and completion, or text"
