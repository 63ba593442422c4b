"""Render conversations of the same shape from a learned layout instead of running their template for each.

Most templates insert the texts of a conversation between fixed strings that depend only on its roles. So a conversation
whose texts are placeholders is rendered once, and shows the layout of every conversation with the same roles. A layout
is used only if it gives the same text as the template for several samples, and never for texts that templates inspect.
"""

import re
from collections.abc import Callable
from itertools import accumulate, pairwise

from pipeline.data.examples import Conversation, Message
from pipeline.data.template_renderer import RenderedText

PLACEHOLDER = "\ue000{}\ue001"  # private-use characters
PLACEHOLDER_PATTERN = re.compile("\ue000(\\d+)\ue001")
TEXT_KEYS = ("content", "reasoning_content")
KNOWN_KEYS = frozenset((*TEXT_KEYS, "role", "weight"))
INSPECTED = re.compile(r"\A/|<[\w/|]|\[[A-Z/]|[Tt]hink|[\ue000\ue001]")
"""Matches texts that need the template, because it may split them at tags or react to switches such as /no_think."""
HINTS = ("<", "[", "hink", "\ue000", "\ue001")  # INSPECTED matches only texts with a leading "/" or one of these
SAMPLES = (
    "a",
    "B2",
    "Two words.\n\nA second paragraph: 1, 2, 3.",
    "caf\u00e9 \u6f22\u5b57 \u2713",
    "long " * 1000 + "text",
    '{"json": ["or", "code"]}',
    "# Title\n- item\n    indented",
)
SPACED_SAMPLES = (*SAMPLES, " a", "B2\n", "\n\nline\n", "\tcaf\u00e9 ", "  two words \n ", "\r\nend\u00a0")
"""Samples for conversations with a text that begins or ends with white space, which some templates trim."""

Render = Callable[[Conversation], list[RenderedText]]


def shape(conversation: Conversation) -> object | None:
    """Return what a layout depends on, or None if the conversation needs the template.

    A layout depends on the roles, the weights, which messages have reasoning, the system prompts, and whether a text
    begins or ends with white space.
    """
    if conversation.tools:
        return None
    parts: list[object] = []
    spaced = False
    for message in conversation.messages:
        if not message.keys() <= KNOWN_KEYS:
            return None
        if message["role"] in ("user", "assistant"):
            texts = _texts_by_key(message)
            for text in texts.values():
                stripped = text.strip()
                if not stripped or _is_inspected(stripped):
                    return None
                spaced = spaced or len(stripped) < len(text)
            parts.append((message["role"], *texts, message.get("weight")))
        else:
            parts.append((message["role"], message["content"]))
    return (*parts, spaced)


def _is_inspected(text: str) -> bool:
    return (text[0] == "/" or any(map(text.__contains__, HINTS))) and INSPECTED.search(text) is not None


class Layout:
    """The documents of all conversations of one shape, with numbered gaps for their texts."""

    def __init__(self, documents: list[tuple[list[str | int], list[tuple[int, int]]]]) -> None:
        """Each document has pieces and trained spans.

        A piece is a fixed string, or the number of a text. A span is a range of pieces, (start, stop).
        """
        self._documents = documents

    def fill(self, conversation: Conversation) -> list[RenderedText]:
        """Return the documents of a conversation."""
        texts = _texts(conversation)
        filled = []
        for pieces, spans in self._documents:
            strings = [texts[piece] if isinstance(piece, int) else piece for piece in pieces]
            ends = [0, *accumulate(map(len, strings))]
            filled.append(RenderedText("".join(strings), [(ends[start], ends[stop]) for start, stop in spans]))
        return filled


def learn(conversation: Conversation, render: Render) -> Layout | None:
    """Return the layout of all conversations of this shape, or None if the layout depends on their texts."""
    texts = _texts(conversation)
    count = len(texts)
    documents = render(_with_texts(conversation, [PLACEHOLDER.format(number) for number in range(count)]))
    layout = Layout([_split(document) for document in documents])
    samples = SAMPLES if all(text == text.strip() for text in texts) else SPACED_SAMPLES
    for first in range(len(samples)):
        sample = _with_texts(conversation, [samples[(first + number) % len(samples)] for number in range(count)])
        if layout.fill(sample) != render(sample):
            return None
    return layout


def _split(document: RenderedText) -> tuple[list[str | int], list[tuple[int, int]]]:
    """Split a text at its placeholders and at the edges of its spans."""
    gaps = {match.start(): match for match in PLACEHOLDER_PATTERN.finditer(document.text)}
    edges = {0, len(document.text), *(edge for span in document.spans for edge in span)}
    edges |= {edge for match in gaps.values() for edge in match.span()}
    ordered = sorted(edges)
    pieces = [int(gaps[start][1]) if start in gaps else document.text[start:stop] for start, stop in pairwise(ordered)]
    return pieces, [(ordered.index(start), ordered.index(stop)) for start, stop in document.spans]


def _texts_by_key(message: Message) -> dict[str, str]:
    return {key: message[key] for key in TEXT_KEYS if key in message}


def _texts(conversation: Conversation) -> list[str]:
    return [
        text
        for message in conversation.messages
        if message["role"] in ("user", "assistant")
        for text in _texts_by_key(message).values()
    ]


def _with_texts(conversation: Conversation, texts: list[str]) -> Conversation:
    """Return the conversation with its texts replaced by `texts`."""
    remaining = iter(texts)
    messages = [
        message | {key: next(remaining) for key in _texts_by_key(message)}
        if message["role"] in ("user", "assistant")
        else message
        for message in conversation.messages
    ]
    return conversation._replace(messages=messages)
