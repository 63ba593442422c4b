"""Check that a rendered document contains each text of its conversation, and trains the answers.

Chat templates drop or repeat texts without an error. For example, some remove the reasoning in <think> tags, render
only the first of two tool calls, or skip a system message in the middle of a conversation.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from raymill.data.examples import TEXT_PARTS, Message
from raymill.data.template_renderer import RenderedText

TAG = r"<[^<>/\s][^<>\s]*>|\[[A-Z_]+\]"
FIRST_TAG, LAST_TAG = re.compile(rf"({TAG})"), re.compile(rf"({TAG})\s*\Z")
CLOSING_TAG = re.compile(r"</[^<>\s]+>|\[/[A-Z_]+\]")
SWITCH = re.compile(r"/(?:no_?)?think\b|/system_override\b")
"""Matches words in instructions and questions that some templates obey and remove."""
COVER = "\0"  # replaces text that is not searched
CHANGE_TEMPLATE = "set chat_template in [preprocess]"
INSTRUCTIONS = ("system", "developer")

Place = tuple[int, int]


class Template(NamedTuple):
    """What the check needs to know about a chat template."""

    text: str
    renders_reasoning: bool
    selects_spans: bool
    """Whether the user's own marks say what to train. Then an answer may be outside the trained spans."""


class Part(NamedTuple):
    """A text that must be in the document."""

    at: int
    """Position of the message."""
    kind: Literal["reasoning", "content", "call", "later call"]
    text: str


def problem(messages: list[Message], trained: Sequence[int], document: RenderedText, template: Template) -> str | None:
    """Return what is wrong with a document, or None.

    `trained` are the positions of the messages that the document trains. The document must also contain the messages
    before them, but not their reasoning, which templates may drop from earlier turns.
    """
    text, spans = document
    messages = [_with_content(message, text) for message in messages]
    others = [at for at in range(trained[-1]) if at not in trained]
    others.sort(key=lambda at: messages[at]["role"] in INSTRUCTIONS)  # some templates move instructions to the end
    earlier = [part for at in others for part in _context(messages[at], at, template)]
    answers = [part for at in trained for part in _parts(messages[at], at)]
    if template.selects_spans:
        return _first_lost(messages, [*answers, *earlier], text, template)
    places = _places(_cover(text, spans), earlier)
    if None in places:
        return _lost(messages, earlier[places.index(None)], template)
    if len(spans) != len(trained):  # a template may mark several spans of a turn
        return _first_lost(messages, answers, COVER.join(text[start:stop] for start, stop in spans), template)
    ends = sorted(place[1] for place in places if place)
    for at, (start, stop) in zip(trained, spans, strict=True):
        before = bisect_right(ends, start)
        opening = text[ends[before - 1] if before else 0 : start]
        if reason := _problem_in_turn(messages, at, opening, text[start:stop], template):
            return reason
    return None


def _first_lost(messages: list[Message], parts: list[Part], text: str, template: Template) -> str | None:
    places = _places(text, parts)
    return _lost(messages, parts[places.index(None)], template) if None in places else None


def _problem_in_turn(messages: list[Message], at: int, opening: str, written: str, template: Template) -> str | None:
    """Return what is wrong with a turn. `opening` is the end of its prompt, and `written` is its trained text."""
    parts = list(_parts(messages[at], at))
    places = _places(written, parts)
    reasoning, content, *call = parts
    tag, thought, answer = _inline_reasoning(content.text)
    opened, closed = (_surplus(each, opening + written, parts) for each in (tag, _closing(tag))) if tag else (0, 0)
    # a template may render the reasoning and the answer with white space and an opening tag of its own
    if tag and places[1] is None and (not closed or not thought.strip()):
        parts = [reasoning, *(content._replace(text=text.strip()) for text in (thought, answer)), *call]
        places = _places(written, parts)
    if None in places:
        return _lost(messages, parts[places.index(None)], template)
    prompted = LAST_TAG.search(opening)
    if prompted and _closing(prompted[1]) in template.text:  # the prompt opens the reasoning
        start, closing = prompted[1], _closing(prompted[1])
        if written.lstrip().startswith(start) or (tag == start and closed > 0):
            remedy = _advice(template, f"remove {start} from the start of the answer") if tag else CHANGE_TEMPLATE
            return f"the prompt already ends with {start}; {remedy}"
        if closing not in written:
            return (
                f"the prompt ends with {start}, which the answer does not close; begin the answer with its reasoning "
                f"and {closing}"
            )
    if (opened if content.text.startswith(tag) else closed) > 0:
        return f"the chat template writes {tag} before an answer that has its own; {_advice(template)}"
    rest = _cover(written, [place for place in places if place])
    if any(part.text in rest and part.text not in template.text for part in (reasoning, content) if part.text):
        return f"the chat template renders an answer twice; {CHANGE_TEMPLATE}"
    return None


def _surplus(tag: str, turn: str, parts: list[Part]) -> int:
    """Return how many more of these tags a turn has than its parts."""
    return turn.count(tag) - sum(part.text.count(tag) for part in parts)


# ---------------------------------------------------------------- the texts of a conversation


def _with_content(message: Message, text: str) -> Message:
    """Return a message of several text parts with the content that the template made of them."""
    joined = "".join(message.get(TEXT_PARTS, ())).strip()
    return message | {"content": joined} if joined and joined in text else message


def _parts(message: Message, at: int) -> Iterator[Part]:
    """Yield all texts of a message: its reasoning, its content, and the names and arguments of its calls."""
    yield Part(at, "reasoning", message.get("reasoning_content", "").strip())
    yield Part(at, "content", message["content"].strip())
    for number, call in enumerate(message.get("tool_calls", [])):
        for text in (call["function"]["name"], *_leaves(call["function"]["arguments"])):
            yield Part(at, "later call" if number else "call", text)


def _context(message: Message, at: int, template: Template) -> Iterator[Part]:
    """Yield the texts of an earlier message that a prompt must contain."""
    if message["role"] != "assistant":
        for text in SWITCH.split(message["content"]):
            yield Part(at, "content", text.strip())
        return
    _, content, *call = _parts(message, at)
    tag, _, answer = _inline_reasoning(content.text)
    if call:  # gpt-oss treats text before a call as reasoning
        yield from call
    elif tag and _closing(tag) in template.text:
        yield content._replace(text=answer.strip())
    else:
        yield content


def _inline_reasoning(content: str) -> tuple[str, str, str]:
    """Return the opening tag of reasoning in an answer, which may lack it, the reasoning, and the text after it.

    The tag is empty if the answer neither begins with a tag nor closes one that it did not open.
    """
    if opening := FIRST_TAG.match(content):
        reasoning, closing, answer = content[opening.end() :].partition(_closing(opening[1]))
        return (opening[1], reasoning, answer) if closing else (opening[1], "", reasoning)
    if closing := CLOSING_TAG.search(content):
        tag = closing[0].replace("/", "", 1)
        if tag not in content[: closing.start()]:
            return tag, content[: closing.start()], content[closing.end() :]
    return "", "", ""


def _closing(tag: str) -> str:
    return f"{tag[0]}/{tag[1:]}"


def _leaves(value: Any) -> Iterator[str]:
    """Yield the keys, texts and numbers of the arguments of a call."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key.strip()
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value.strip()
    elif value is not None and not isinstance(value, bool):
        yield str(value)


# ---------------------------------------------------------------- the search


def _places(text: str, parts: list[Part]) -> list[Place | None]:
    """Return where the parts are in a text, without overlaps, or None for a part that is missing."""
    places: list[Place] = []
    rest, end = text, 0
    for part in parts:
        place = _find(rest, part.text, end)
        if place is None and rest is text:  # parts at the end of the list may come first in the text
            rest = _cover(text, places)
            place = _find(rest, part.text, 0)
        if place is None:
            break
        places.append(place)
        end = place[1]
    else:
        return [*places]
    # in any other order, find long parts first, because they may contain short ones
    found: dict[int, Place] = {}
    for number in sorted(range(len(parts)), key=lambda number: -len(parts[number].text)):
        if place := _find(text, parts[number].text, 0):
            found[number] = place
            text = _cover(text, [place])
    return [found.get(number) for number in range(len(parts))]


def _find(text: str, part: str, start: int) -> Place | None:
    """Return where a text is, as itself, as JSON or as Python."""
    at = text.find(part, start)
    if at >= 0:
        return at, at + len(part)
    for form in (json.dumps(part, ensure_ascii=False), json.dumps(part), repr(part)):
        at = text.find(form[1:-1], start)
        if at >= 0:
            return at, at + len(form) - 2
    return None


def _cover(text: str, places: Sequence[Place]) -> str:
    pieces, end = [], 0
    for start, stop in sorted(places):
        pieces += [text[end:start], COVER * (stop - start)]
        end = stop
    return "".join([*pieces, text[end:]])


# ---------------------------------------------------------------- the reasons


def _lost(messages: list[Message], part: Part, template: Template) -> str:
    """Return why a text is not where it should be, and what to do."""
    message, before = messages[part.at], messages[: part.at]
    match message["role"], part.kind:
        case _, "later call":
            return (
                "the chat template renders only one tool call of a message; put each call into a message of its own, "
                "followed by its result"
            )
        case _, "call" if part.text == message["tool_calls"][0]["function"]["name"]:
            return "the chat template renders the id of a tool call, but not its name; use ids like functions.NAME:0"
        case _, "call":
            return f"the chat template drops an argument of a tool call; {CHANGE_TEMPLATE}"
        case _, "reasoning":
            return f"the chat template drops the reasoning of an answer; remove reasoning_content, or {CHANGE_TEMPLATE}"
        case "assistant", _ if CLOSING_TAG.search(message["content"]):
            return f"the chat template drops text before or after a tag in an answer; {_advice(template)}"
        case "assistant", _ if before and before[-1]["role"] == "assistant":
            return "the chat template drops the second of two assistant messages in a row; join the two messages"
        case (("system" | "developer"), _) if sum(other["role"] in INSTRUCTIONS for other in messages) > 1:
            return (
                "the chat template renders only one of several system and developer messages; join them into the first "
                "message"
            )
        case (("system" | "developer"), _) if before:
            return f"the chat template drops a {message['role']} message after other messages; move it to the start"
        case role, _:
            return f"the chat template drops text of a message with the role {role}; {CHANGE_TEMPLATE}"


def _advice(template: Template, otherwise: str = "") -> str:
    if template.renders_reasoning:
        return "move the reasoning of the answer, without its tags, into reasoning_content"
    return otherwise or f"remove the reasoning of the answer, or {CHANGE_TEMPLATE} to a template that renders reasoning"
