"""Read training rows in published formats: conversations, instructions with answers, prompts with completions, or text.

The columns of a row determine its format. `preprocess` prints the names of columns that no format reads.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pipeline.data.examples import BadRow, Completion, Conversation, Example, Message
from pipeline.data.messages import REASONING_KEYS, decode_json, normalize_messages, normalize_tools, require_text

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
QUESTIONS = ("instruction", "question", "query", "prompt")
CONTEXTS = ("input", "context")
ANSWERS = ("response", "output", "answer", "completion", "target")


class Format(NamedTuple):
    """A row format."""

    name: str
    required: tuple[tuple[str, ...], ...]
    """Required columns: at least one of each tuple."""
    optional: tuple[str, ...]
    """Optional columns."""
    read: Callable[[Mapping[str, Any]], Example]

    def fits(self, row: Mapping[str, Any]) -> bool:
        return all(any(row.get(name) is not None for name in names) for names in self.required)

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(name for names in self.required for name in names) | frozenset(self.optional)


def read_example(row: Mapping[str, Any]) -> Example:
    """Return the example in a row.

    Raises:
        BadRow: no format fits the row, or the row is malformed.
    """
    example = format_of(row).read(row)
    if isinstance(example, Completion):
        if not example.completion.strip():
            raise BadRow("nothing to train on, because the text is empty")
        return example
    answers = [message for message in example.messages if message["role"] == "assistant"]
    if not answers:
        raise BadRow("no assistant turn")
    if not all(message["content"].strip() or message.get("tool_calls") for message in answers):
        raise BadRow("an empty assistant turn")
    if all(message.get("weight") == 0 for message in answers):
        raise BadRow("every assistant turn has weight 0")
    return example


def format_of(row: Mapping[str, Any]) -> Format:
    """Return the first of FORMATS that fits a row.

    Raises:
        BadRow: no format fits, or the row has an unsupported format.
    """
    found = next((row_format for row_format in FORMATS if row_format.fits(row)), None)
    if not found or found.required[0] == ("prompt",):
        for columns, reason in UNSUPPORTED.items():
            if all(row.get(name) is not None for name in columns):
                raise BadRow(reason)
    if not found:
        raise BadRow(UNKNOWN_COLUMNS)
    return found


def without_nulls(value: Any) -> Any:
    """Return a value without nulls, which parquet adds for keys that a row lacks."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- one reader per format


def _read_messages(row: Mapping[str, Any]) -> Conversation:
    return _with_side_columns(row, normalize_messages(decode_json(row["messages"], "messages")))


def _read_sharegpt(row: Mapping[str, Any]) -> Conversation:
    turns = decode_json(row["conversations"], "conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("conversations is not a list of objects")
    return _with_side_columns(row, normalize_messages([_sharegpt_message(turn) for turn in turns]))


def _sharegpt_message(turn: Message) -> Message:
    speaker = turn.get("from")
    if speaker is None:
        return turn  # a turn that already has role and content
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise BadRow(f"a turn with an unknown `from`; known: {', '.join(SHAREGPT_ROLES)}")
    value = turn.get("value")
    message: Message = {"role": SHAREGPT_ROLES[speaker], "content": value}
    if speaker == "function_call":
        calls = decode_json(value, "a function call")
        message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return message | {key: turn[key] for key in ("weight", *REASONING_KEYS) if turn.get(key) is not None}


def _read_instruction(row: Mapping[str, Any]) -> Conversation:
    """Read a row with a question and an answer, as in Alpaca or Dolly. Earlier turns come from its `history`."""
    question, context, answer = (_first(row, names) for names in (QUESTIONS, CONTEXTS, ANSWERS))
    content = f"{require_text(question)}\n\n{require_text(context)}" if context else question
    history = decode_json(row.get("history") or [], "history")
    try:
        past = [message for asked, answered in history for message in (_user(asked), _assistant(answered))]
    except (TypeError, ValueError):
        raise BadRow("history is not a list of pairs") from None
    return _with_side_columns(row, normalize_messages([*past, _user(content), _assistant(answer)]))


def _read_completion(row: Mapping[str, Any]) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise BadRow("prompt and completion are neither both texts nor both lists of messages")
    untrained = [
        message | {"weight": 0} if message["role"] == "assistant" else message for message in normalize_messages(prompt)
    ]
    return _with_side_columns(row, [*untrained, *normalize_messages(completion)])


def _read_text(row: Mapping[str, Any]) -> Completion:
    return Completion("", require_text(row["text"]))


def _with_side_columns(row: Mapping[str, Any], messages: list[Message]) -> Conversation:
    """Add the system prompt and the tools from the row's other columns."""
    if row.get("functions") is not None:
        raise BadRow("functions is deprecated: use tools")
    if system := row.get("system") or row.get("system_prompt"):
        if messages and messages[0]["role"] == "system":
            raise BadRow("two system prompts: a column and a message")
        messages = [{"role": "system", "content": require_text(system)}, *messages]
    return Conversation(messages, normalize_tools(row.get("tools")) or None)


def _user(content: object) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: object) -> Message:
    return {"role": "assistant", "content": content}


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


# ---------------------------------------------------------------- the formats

SIDE_COLUMNS = ("tools", "functions", "system", "system_prompt")
FORMATS = (
    Format("conversations", (("messages",),), SIDE_COLUMNS, _read_messages),
    Format("ShareGPT conversations", (("conversations",),), SIDE_COLUMNS, _read_sharegpt),
    Format("prompts and completions", (("prompt",), ("completion",)), SIDE_COLUMNS, _read_completion),
    Format("instructions and answers", (QUESTIONS, ANSWERS), (*CONTEXTS, "history", *SIDE_COLUMNS), _read_instruction),
    Format("plain text", (("text",),), (), _read_text),
)
UNSUPPORTED = {
    ("chosen", "rejected"): "a preference pair (chosen, rejected): this project does not support DPO",
    ("prompt", "completion", "label"): "a rated completion (label): this project does not support KTO",
}
"""Columns that identify unsupported formats, and why their rows are rejected."""
COLUMNS = tuple(
    sorted(
        {name for row_format in FORMATS for name in row_format.columns}
        | {name for columns in UNSUPPORTED for name in columns}
    )
)
UNKNOWN_COLUMNS = "no known columns"
EXPECTED_COLUMNS = "messages, or instruction and response, or prompt and completion, or text"
