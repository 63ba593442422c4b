"""Render conversations of the same shape from a learned layout instead of running their template for each.

Most templates insert the texts of a conversation between fixed strings that depend only on its roles. So a conversation
whose texts are placeholders is rendered once, and shows the layout of every conversation with the same roles. A layout
is used only if it gives the same text as the template for several samples, and never for texts that templates inspect.

Learning a layout takes as long as rendering up to 15 conversations. So a layout is learned only for a shape that is
frequent enough, and data without frequent shapes is rendered as fast as without layouts.
"""

import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple

import jinja2

from raymill.data.examples import Conversation
from raymill.data.template_renderer import RenderedText

MAX_LAYOUTS = 10_000  # layouts kept in memory; after that, conversations of new shapes are rendered with the template
MAX_COUNTED = 100_000  # shapes counted; after that, counting starts over
LEARNING_SHARE = 0.03  # learning in vain may render this share of the conversations once more
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
SPACED_SAMPLES = (" a", "B2\n", "\n\nline\n", "\tcaf\u00e9 ", "  two words \n ", "\r\nend\u00a0")
"""More samples for conversations with a text that begins or ends with white space, which some templates trim."""
MAX_RENDERINGS = 2 + len(SAMPLES) + len(SPACED_SAMPLES)  # also the placeholders, and the template's own strings

Render = Callable[[Conversation], list[RenderedText] | Exception]
"""Returns the documents of a conversation, or an exception if the template rejects it."""


class Outline(NamedTuple):
    """A conversation, divided into what a layout depends on and the texts for its gaps."""

    shape: object
    """The roles, the weights, the keys of the texts, the texts without a gap, and whether white space surrounds any."""
    gaps: list[tuple[int, str]]
    """The message and the key of each text that has a gap."""
    texts: list[str]
    is_spaced: bool
    """Whether a text begins or ends with white space."""


class Layout:
    """The documents of all conversations of one shape, with numbered gaps for their texts."""

    def __init__(self, documents: list[tuple[list[str | int], list[tuple[int, int]]]]) -> None:
        """Each document has pieces and trained spans.

        A piece is a fixed string, or the number of a text. A span is a range of pieces, (start, stop).
        """
        self._documents = documents

    def fill(self, texts: list[str]) -> list[RenderedText]:
        """Return the documents of a conversation with these texts."""
        filled = []
        for pieces, spans in self._documents:
            strings = [texts[piece] if isinstance(piece, int) else piece for piece in pieces]
            ends = [0, *accumulate(map(len, strings))]
            filled.append(RenderedText("".join(strings), [(ends[start], ends[stop]) for start, stop in spans]))
        return filled


class Layouts:
    """The layouts of one template, by shape."""

    def __init__(self, template: str, stops: tuple[str, ...]) -> None:
        """`stops` are the stop tokens, which no answer may contain."""
        # a template may react to its own strings: texts with a switch, or with a word at an edge, need the template
        strings = [string for string in sorted(_strings(template)) if not INSPECTED.search(f"x{string}")]
        self._switches = [string for string in strings if "/" in string or any(stop in string for stop in stops)]
        self._words = tuple(string for string in strings if re.search(r"\w{2}", string))
        # and all other strings are tried as one of the samples
        self._own_strings = " ".join(["a", *(string for string in strings if string not in self._switches), "b"])
        self._layouts: dict[object, Layout | None] = {}
        self._counts: Counter[int] = Counter()
        self._seen = self._wasted = 0  # conversations seen, and rendered for layouts that turned out to be wrong

    def documents(self, conversations: list[Conversation], render: Render) -> list[list[RenderedText] | None]:
        """Return the documents of each conversation, or None for a conversation that has to be rendered."""
        outlines = [self._outline(conversation) for conversation in conversations]
        counts = Counter(outline.shape for outline in outlines if outline)
        for conversation, outline in zip(conversations, outlines, strict=True):
            if outline and outline.shape not in self._layouts and self._is_frequent(outline.shape, counts):
                self._layouts[outline.shape] = self._learn(conversation, outline, render)
        if len(self._counts) > MAX_COUNTED:
            self._counts.clear()
        self._counts.update({hash(shape): count for shape, count in counts.items()})
        self._seen += len(conversations)
        return [self._fill(outline) if outline else None for outline in outlines]

    def _fill(self, outline: Outline) -> list[RenderedText] | None:
        layout = self._layouts.get(outline.shape)
        return layout.fill(outline.texts) if layout else None

    def _is_frequent(self, shape: object, counts: Counter[object]) -> bool:
        """Return whether this batch makes up for learning, or earlier ones make the loss small in any case."""
        if len(self._layouts) == MAX_LAYOUTS or self._wasted > LEARNING_SHARE * self._seen:
            return False
        return counts[shape] + LEARNING_SHARE * self._counts[hash(shape)] > MAX_RENDERINGS

    def _outline(self, conversation: Conversation) -> Outline | None:
        """Return the outline of a conversation, or None if the conversation needs the template."""
        if conversation.tools:
            return None
        shape: list[object] = []
        gaps: list[tuple[int, str]] = []
        texts: list[str] = []
        is_spaced = False
        for number, message in enumerate(conversation.messages):
            if not message.keys() <= KNOWN_KEYS:
                return None
            role = message["role"]
            part: list[object] = [role, message.get("weight")]
            for key in TEXT_KEYS:
                if (text := message.get(key)) is None:
                    continue
                stripped = text.strip()
                if role == "tool" or not stripped or self._is_inspected(stripped):
                    if role in ("user", "assistant"):
                        return None
                    part.append(text)  # a system prompt that many conversations share
                    continue
                is_spaced = is_spaced or len(stripped) < len(text)
                part.append(None)
                gaps.append((number, key))
                texts.append(text)
            shape.append(tuple(part))
        return Outline((*shape, is_spaced), gaps, texts, is_spaced)

    def _is_inspected(self, text: str) -> bool:
        may_match = text[0] == "/" or any(map(text.__contains__, HINTS))
        return (
            (may_match and INSPECTED.search(text) is not None)
            or text.startswith(self._words)
            or text.endswith(self._words)
            or any(map(text.__contains__, self._switches))
        )

    def _learn(self, conversation: Conversation, outline: Outline, render: Render) -> Layout | None:
        """Return the layout of all conversations of this shape, or None if the layout depends on their texts."""
        count = len(outline.texts)
        documents = render(_with_texts(conversation, outline, [PLACEHOLDER.format(number) for number in range(count)]))
        if isinstance(documents, Exception):
            self._wasted += 1
            return None
        layout = Layout([_split(document) for document in documents])
        samples = (*(SPACED_SAMPLES if outline.is_spaced else ()), self._own_strings, *SAMPLES)
        for first in range(len(samples)):
            texts = [samples[(first + number) % len(samples)] for number in range(count)]
            if layout.fill(texts) != render(_with_texts(conversation, outline, texts)):
                self._wasted += 2 + first
                return None
        return layout


def _strings(template: str) -> set[str]:
    """Return the strings in a template's code."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree = _compile_jinja_template(template).environment.parse(template)
    constants = [constant.value for constant in tree.find_all(jinja2.nodes.Const)]
    return {value for value in constants if isinstance(value, str) and value.strip()}


def _with_texts(conversation: Conversation, outline: Outline, texts: list[str]) -> Conversation:
    """Return the conversation with `texts` in its gaps."""
    messages = [dict(message) for message in conversation.messages]
    for (number, key), text in zip(outline.gaps, texts, strict=True):
        messages[number][key] = text
    return conversation._replace(messages=messages)


def _split(document: RenderedText) -> tuple[list[str | int], list[tuple[int, int]]]:
    """Split a text at its placeholders and at the edges of its spans."""
    gaps = {match.start(): match for match in PLACEHOLDER_PATTERN.finditer(document.text)}
    edges = {0, len(document.text), *(edge for span in document.spans for edge in span)}
    edges |= {edge for match in gaps.values() for edge in match.span()}
    ordered = sorted(edges)
    pieces = [int(gaps[start][1]) if start in gaps else document.text[start:stop] for start, stop in pairwise(ordered)]
    return pieces, [(ordered.index(start), ordered.index(stop)) for start, stop in document.spans]
