"""Run a chat template on conversations, with the same input that vLLM would give it."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import jinja2

from pipeline.data.examples import Conversation, Message

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""Errors that templates raise on unexpected messages."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Matches the `generation` blocks of Transformers, which mark what to train."""


class RenderedText(NamedTuple):
    """A text, and the spans (start, stop) of its characters to train on."""

    text: str
    spans: list[tuple[int, int]]


class TemplateRenderer:
    """A chat template, and the special tokens that it can use."""

    def __init__(self, template: str, special_tokens: Mapping[str, object]) -> None:
        """Raises: one of TEMPLATE_ERRORS if the template is not valid Jinja."""
        self.template = template
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "'developer'" in template or '"developer"' in template  # the same test as in vLLM
        self._reads_parts = _reads_parts(template)

    def prompt(self, conversation: Conversation) -> str:
        """Return the text that a server renders for the messages, up to the start of the answer."""
        return self._render(conversation, self.template, add_generation_prompt=True)[0]

    def conversation(self, conversation: Conversation, template: str | None = None) -> str:
        """Return the text of a finished conversation. `template` replaces the renderer's own template."""
        return self._render(conversation, template or self.template)[0]

    def marked(self, conversation: Conversation, template: str) -> RenderedText:
        """Render a finished conversation with a template that has marks. Return the text and the marked spans."""
        text, spans = self._render(conversation, template, return_assistant_tokens_mask=True)
        return RenderedText(text, spans)

    def _render(self, conversation: Conversation, template: str, **options: bool) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        [text], *spans = render_jinja_template(
            [self._as_served(conversation.messages)],
            tools=conversation.tools,
            chat_template=template,
            **options,
            **self._special_tokens,
        )
        return text, spans[0][0] if options.get("return_assistant_tokens_mask") else []

    def _as_served(self, messages: list[Message]) -> list[Message]:
        """Return messages as vLLM passes them to the template."""
        if any("weight" in message for message in messages):
            messages = [{key: message[key] for key in message if key != "weight"} for message in messages]
        if not self._knows_developer:
            messages = _with_developer_as_system(messages)
        return [_with_parts(message) for message in messages] if self._reads_parts else messages


def _with_developer_as_system(messages: list[Message]) -> list[Message]:
    """Merge system and developer messages into one, as vLLM does for templates without a developer role."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    instructions = [message for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message not in instructions]
    return [{"role": "system", "content": "\n\n".join(message["content"] for message in instructions)}, *others]


def _reads_parts(template: str) -> bool:
    """Return whether a template loops over the parts of a message. vLLM passes parts, not text, to such a template."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    for loop in _compile_jinja_template(template).environment.parse(template).find_all(jinja2.nodes.For):
        iterated = loop.iter
        while isinstance(iterated, jinja2.nodes.Filter) and iterated.node:
            iterated = iterated.node
        is_name = isinstance(iterated, jinja2.nodes.Name) and iterated.name == "content"
        is_attribute = isinstance(iterated, jinja2.nodes.Getattr) and iterated.attr == "content"
        key = iterated.arg if isinstance(iterated, jinja2.nodes.Getitem) else None
        if is_name or is_attribute or (isinstance(key, jinja2.nodes.Const) and key.value == "content"):
            return True
    return False


def _with_parts(message: Message) -> Message:
    if message["role"] == "tool":
        return message
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}] if content else []}
