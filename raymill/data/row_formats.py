"""Read training rows in published formats: conversations, instructions with answers, prompts with completions, or text.

The columns of a row determine its format. `preprocess` prints the names of columns that no format reads. A job's script
can add formats of its own: docs/data.md.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from raymill import code_identity
from raymill.data.examples import BadRow, Completion, Conversation, Example, Message, Pair, Rated
from raymill.data.messages import (
    REASONING_KEYS,
    decode_json,
    normalize_messages,
    normalize_tools,
    require_objects,
    require_text,
)
from raymill.data.options import Task
from raymill.errors import UserError

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
SHAREGPT_KEYS = ("weight", "tool_calls", "tool_call_id", *REASONING_KEYS)
QUESTIONS = ("instruction", "question", "query", "prompt")
CONTEXTS = ("input", "context")
QUESTION_MARK, ANSWER_MARK = "\n\nHuman:", "\n\nAssistant:"
"""In texts with several turns, as in hh-rlhf."""
ANSWERS = ("response", "output", "answer", "completion", "target")
LABELS = ("label", "kto_tag")
"""Columns that say whether an answer is good."""
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


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

    def columns_read(self, row: Mapping[str, Any]) -> frozenset[str]:
        """Return the columns that are read if the row has them. Of several questions or answers, one is read."""
        return frozenset(_filled(row, names) for names in self.required) | frozenset(self.optional)

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(name for names in self.required for name in names) | frozenset(self.optional)


def read_example(row: Mapping[str, Any], formats: Iterable[Format] = ()) -> Example:
    """Return the example in a row, as the first of these formats reads it that fits. Without `formats`: FORMATS.

    Raises:
        BadRow: no format fits the row, or the row is malformed.
        UserError: a format of the user returns something else than an example.
    """
    row_format = format_of(row, formats)
    example = row_format.read(row) if row_format in ALL_FORMATS else _read_own(row_format, row)
    if isinstance(example, Pair):
        if example.chosen == example.rejected:
            raise BadRow("chosen and rejected are equal")
        return Pair(*map(_checked, example))
    if isinstance(example, Rated):
        return example._replace(answer=_checked(example.answer))
    return _checked(example)


def _checked(example: Conversation | Completion) -> Conversation | Completion:
    """Return an example. Raises `BadRow` if there is nothing to train."""
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


def format_of(row: Mapping[str, Any], formats: Iterable[Format] = ()) -> Format:
    """Return the first format that fits a row. Without `formats`: the first of FORMATS.

    Raises:
        BadRow: no format fits, or the row has an unsupported format.
    """
    found = next((row_format for row_format in formats or FORMATS if row_format.fits(row)), None)
    if not found or (found in FORMATS and found.required[0] == ("prompt",)):
        for columns, reason in UNSUPPORTED.items():
            if all(row.get(name) is not None for name in columns):
                raise BadRow(reason)
    if not found:
        raise BadRow(UNKNOWN_COLUMNS)
    return found


def for_task(task: Task, formats: Iterable[Format]) -> tuple[Format, ...]:
    """Return the formats for a task: `formats`, or those of them that are the user's own, and those of the task."""
    if task == "supervised":
        return tuple(formats)
    published = PAIR_FORMATS if task == "preference" else RATED_FORMATS
    return (*(row_format for row_format in formats if row_format not in FORMATS), *published)


def columns_of(formats: Iterable[Format]) -> tuple[str, ...]:
    """Return all columns that these formats read or reject."""
    read = (row_format.columns for row_format in formats)
    return tuple(sorted({*itertools.chain.from_iterable(read), *itertools.chain.from_iterable(UNSUPPORTED)}))


def identity(formats: Iterable[Format]) -> str:
    """Return the names of formats and, for those of the user, their columns and a hash of their code.

    Raises:
        UserError: the reader of a format has no name.
    """
    published = ", ".join(row_format.name for row_format in FORMATS)
    return ", ".join(
        row_format.name
        if row_format in ALL_FORMATS
        else f"{row_format.name} {list(row_format.required)} {code_identity.name(row_format.read)}"
        for row_format in formats
    ).replace(published, PUBLISHED)


def without_nulls(value: Any) -> Any:
    """Return a value without nulls, which parquet adds for keys that a row lacks."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- one reader per format


def _read_own(row_format: Format, row: Mapping[str, Any]) -> Example:
    """Read a row in a format of the user. If the reader raises an error, the row is bad."""
    try:
        example = row_format.read(row)
    except (BadRow, UserError):
        raise
    except Exception as error:
        raise BadRow(f"the reader of the format {row_format.name} raises {type(error).__name__}: {error}") from error
    if isinstance(example, Pair):
        return Pair(*(_normalized(answer, row_format) for answer in example))
    if isinstance(example, Rated):
        return Rated(_normalized(example.answer, row_format), _truth(example.is_good))
    return _normalized(example, row_format)


def _normalized(example: Any, row_format: Format) -> Conversation | Completion:
    if isinstance(example, Conversation):
        return Conversation(normalize_messages(example.messages), normalize_tools(example.tools) or None)
    if isinstance(example, Completion):
        return Completion(require_text(example.prompt), require_text(example.completion))
    raise UserError(
        f"the reader of the format {row_format.name} returns {type(example).__name__}; return a Conversation, a "
        "Completion, or a Pair or Rated of them from raymill.data.examples."
    )


def _read_messages(row: Mapping[str, Any]) -> Conversation:
    return _with_side_columns(row, normalize_messages(decode_json(row["messages"], "messages")))


def _read_sharegpt(row: Mapping[str, Any]) -> Conversation:
    turns = require_objects(decode_json(row["conversations"], "conversations"), "conversations")
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
    return message | {key: turn[key] for key in SHAREGPT_KEYS if turn.get(key) is not None}


def _read_instruction(row: Mapping[str, Any]) -> Conversation:
    """Read a row with a question and an answer, as in Alpaca or Dolly. Earlier turns come from its `history`."""
    question, context, answer = (row.get(_filled(row, names), "") for names in (QUESTIONS, CONTEXTS, ANSWERS))
    if context not in (None, ""):
        question = "\n\n".join(text for text in (require_text(question), require_text(context)) if text.strip())
    return _with_side_columns(row, normalize_messages([*_history(row), _user(question), _assistant(answer)]))


def _history(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of the earlier turns, which are pairs of texts, or messages with role and content."""
    history = decode_json(row.get("history") or [], "history") or []
    if isinstance(history, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        return [message for question, answer in history for message in (_user(question), _assistant(answer))]
    if isinstance(history, list) and all(isinstance(turn, dict) and "role" in turn for turn in history):
        return history
    raise BadRow("history is neither a list of pairs nor a list of messages with role and content")


def _read_completion(row: Mapping[str, Any]) -> Example:
    prompt, completion = _text_or_messages(row["prompt"]), row["completion"]  # `generate` writes messages as JSON
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    if isinstance(prompt, list):
        completion = _text_or_messages(completion)
        completion = [_assistant(completion)] if isinstance(completion, str) else completion
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise BadRow("prompt and completion are neither both texts nor both lists of messages")
    untrained = [
        message | {"weight": 0} if message["role"] == "assistant" else message for message in normalize_messages(prompt)
    ]
    return _with_side_columns(row, [*untrained, *normalize_messages(completion)])


def _read_pair(row: Mapping[str, Any]) -> Pair:
    """Read two answers, with a prompt of its own or with the prompt that both begin with."""
    chosen, rejected = (_text_or_messages(row[name]) for name in ("chosen", "rejected"))
    prompt = _text_or_messages(row.get("prompt") or row.get("conversations"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        if not isinstance(prompt, list):
            return _read_texts(row, chosen, rejected, prompt)
        chosen, rejected = [_assistant(chosen)], [_assistant(rejected)]
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise BadRow("chosen and rejected are neither both texts nor both lists of messages")
    before, answers = _split_prompt(prompt, [normalize_messages(answer) for answer in (chosen, rejected)])
    if not all(answer and answer[0]["role"] == "assistant" for answer in answers):
        raise BadRow("chosen and rejected differ before an assistant turn, or one of them ends before it")
    untrained = [message | {"weight": 0} if message["role"] == "assistant" else message for message in before]
    return Pair(*(_with_side_columns(row, [*untrained, *answer]) for answer in answers))


def _read_texts(row: Mapping[str, Any], chosen: str, rejected: str, prompt: object) -> Pair:
    """Read two answers that are texts, perhaps with the prompt before both."""
    if lost := [name for name in (*QUESTIONS[:-1], *CONTEXTS, "history", *SIDE_COLUMNS) if row.get(name)]:
        raise BadRow(f"pairs of texts with {lost[0]}, which only pairs of messages can have; put it into `prompt`")
    start = require_text(prompt) if prompt else _common_text(chosen, rejected)
    has_prompt = chosen.startswith(start) and rejected.startswith(start)
    return Pair(*(Completion(start, answer[len(start) if has_prompt else 0 :]) for answer in (chosen, rejected)))


def _split_prompt(prompt: object, answers: list[list[Message]]) -> tuple[list[Message], list[list[Message]]]:
    """Return the messages before two answers, and the answers, which may be whole conversations."""
    if isinstance(prompt, list) and prompt:
        before = normalize_messages(prompt)
        is_whole = all(answer[: len(before)] == before for answer in answers)
        return before, [answer[len(before) if is_whole else 0 :] for answer in answers]
    if prompt and all(message["role"] == "assistant" for answer in answers for message in answer[:1]):
        return [_user(require_text(prompt))], answers
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False)))
    return answers[0][:common], [answer[common:] for answer in answers]


def _text_or_messages(value: Any) -> Any:
    """Return a text, or the messages that a value holds: a list or one of them, also in ShareGPT's form or as JSON."""
    found = value
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with contextlib.suppress(BadRow):
            found = decode_json(value, "")
    turns = [found] if isinstance(found, dict) else found
    if isinstance(turns, list) and all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in turns):
        return [_sharegpt_message(turn) for turn in turns]
    return value


def _common_text(first: str, second: str) -> str:
    """Return the prompt that two texts begin with: up to the mark of an answer or, without one, the last white space.

    Raises:
        BadRow: the texts are conversations that differ before the last answer.
    """
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    common = "".join(one for one, _ in pairs)
    before, mark, _ = common.rpartition(ANSWER_MARK)
    prompt = before + mark if mark else re.match(r"(?s)(.*\s)?", common)[0].rstrip(" ")  # type: ignore[index]
    if any(QUESTION_MARK in text[len(prompt) :] for text in (first, second)):
        raise BadRow("chosen and rejected differ before their last answer")
    return prompt


def _rated(read: Callable[[Mapping[str, Any]], Example]) -> Callable[[Mapping[str, Any]], Rated]:
    """Return a reader of rows that have a label, too. In conversations, the label is about the end."""

    def read_rated(row: Mapping[str, Any]) -> Rated:
        answer = read(row)
        if isinstance(answer, Conversation):
            answer = answer._replace(messages=_only_end(answer.messages))
        return Rated(answer, _truth(row[next(name for name in LABELS if row.get(name) is not None)]))  # type: ignore[arg-type]

    return read_rated


def _only_end(messages: list[Message]) -> list[Message]:
    """Return messages of which only the assistant turns after the last user message are trained."""
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        message | {"weight": 0} if message["role"] == "assistant" and number < last else message
        for number, message in enumerate(messages)
    ]


def _truth(label: object) -> bool:
    """Return a label as a truth value. Raises `BadRow` if it is none, such as a score or a rating from 1 to 5."""
    found = TRUTHS.get(str(int(label)) if isinstance(label, float) and label.is_integer() else str(label).lower())
    if found is None:
        raise BadRow("a label that is neither true nor false")
    return found


def _read_text(row: Mapping[str, Any]) -> Completion:
    return Completion("", require_text(row["text"]))


def _with_side_columns(row: Mapping[str, Any], messages: list[Message]) -> Conversation:
    """Add the system prompt and the tools from the row's other columns."""
    if row.get("functions") is not None:
        raise BadRow("functions is deprecated: use tools")
    if system := row.get("system") or row.get("system_prompt"):
        if messages and messages[0]["role"] == "system":
            raise BadRow("two system prompts: a column and a message")
        if row.get("system_prompt") not in (None, "", system):
            raise BadRow("two system prompts: system and system_prompt")
        messages = [{"role": "system", "content": require_text(system)}, *messages]
    return Conversation(messages, normalize_tools(row.get("tools")) or None)


def _user(content: object) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: object) -> Message:
    return {"role": "assistant", "content": content}


def _filled(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the first column that is neither missing nor empty, or the first one."""
    return next((name for name in names if row.get(name) not in (None, "")), names[0])


# ---------------------------------------------------------------- the formats

SIDE_COLUMNS = ("tools", "functions", "system", "system_prompt")
FORMATS = (
    Format("conversations", (("messages",),), SIDE_COLUMNS, _read_messages),
    Format("ShareGPT conversations", (("conversations",),), SIDE_COLUMNS, _read_sharegpt),
    Format("prompts and completions", (("prompt",), ("completion",)), SIDE_COLUMNS, _read_completion),
    Format("instructions and answers", (QUESTIONS, ANSWERS), (*CONTEXTS, "history", *SIDE_COLUMNS), _read_instruction),
    Format("plain text", (("text",),), (), _read_text),
)
PAIR_FORMATS = (
    Format("preference pairs", (("chosen",), ("rejected",)), ("prompt", "conversations", *SIDE_COLUMNS), _read_pair),
)
RATED_FORMATS = tuple(
    Format(f"rated {row_format.name}", (*row_format.required, LABELS), row_format.optional, _rated(row_format.read))
    for row_format in FORMATS[:-1]
)
ALL_FORMATS = (*FORMATS, *PAIR_FORMATS, *RATED_FORMATS)
UNSUPPORTED = {
    ("chosen", "rejected"): "a preference pair (chosen, rejected), which needs --task preference",
    ("prompt", "completion", "label"): "a rated answer (label), which needs --task unpaired_preference",
}
"""Columns that identify unsupported formats, and why their rows are rejected."""
PUBLISHED = "published formats"
"""All of FORMATS, in `identity`."""
UNKNOWN_COLUMNS = "no known columns"
EXPECTED_COLUMNS = "messages, or instruction and response, or prompt and completion, or text"
