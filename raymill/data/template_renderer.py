"""Run a chat template on conversations, with the same input that vLLM would give it."""

import re
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import jinja2

from raymill.data.examples import TEXT_PARTS, Conversation, Message

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Matches the `generation` blocks of Transformers, which mark what to train."""
OWN_KEYS = {"weight", TEXT_PARTS}  # keys of messages that templates do not see


class TemplateFailure(Exception):
    """A template cannot render a conversation. The message says why: what "it", the template, does."""


class RenderedText(NamedTuple):
    """A text, and the spans of its characters to train on."""

    text: str
    spans: list[tuple[int, int]]
    """Each span is (start, stop). The model begins to generate at `start`, so a token never crosses it."""


class TemplateRenderer:
    """A chat template, and the special tokens that it can use."""

    def __init__(self, template: str, special_tokens: Mapping[str, object]) -> None:
        """Raises: TemplateFailure if the template is not valid Jinja."""
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

        messages = self._as_served(conversation.messages)
        try:
            [text], *spans = render_jinja_template(
                [messages], tools=conversation.tools, chat_template=template, **options, **self._special_tokens
            )
        except Exception as error:  # a template is a program, so it can raise anything
            if not messages:
                raise TemplateFailure("it renders no prompt for an assistant turn without earlier messages") from error
            raise TemplateFailure(_reason(error)) from error
        return text, spans[0][0] if options.get("return_assistant_tokens_mask") else []

    def _as_served(self, messages: list[Message]) -> list[Message]:
        """Return messages as vLLM passes them to the template."""
        served = [self._message_as_served(message) for message in messages]
        if not self._knows_developer and any(message["role"] == "developer" for message in messages):
            return self._with_developer_as_system(messages, served)
        return served

    def _message_as_served(self, message: Message) -> Message:
        served = {key: message[key] for key in message if key not in OWN_KEYS} if message.keys() & OWN_KEYS else message
        if not self._reads_parts:
            return served
        if message["role"] == "tool":
            return served | {"content": _text(message)}
        return served | {"content": _parts(message)}

    def _with_developer_as_system(self, messages: list[Message], served: list[Message]) -> list[Message]:
        """Merge system and developer messages into one, as vLLM does for templates without a developer role."""
        found = [at for at, message in enumerate(messages) if message["role"] in ("system", "developer")]
        if found == [0]:
            return [served[0] | {"role": "system"}, *served[1:]]
        texts = [_text(messages[at]) if self._reads_parts else messages[at]["content"] for at in found]
        others = [message for at, message in enumerate(served) if at not in found]
        return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _reason(error: Exception) -> str:
    """Return what a template does wrong, without the words of Jinja, which a user cannot place."""
    if type(error) is jinja2.TemplateError:  # the template called raise_exception
        return f"it says {str(error).strip().partition(chr(10))[0]!r}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return f"it fails{f' in line {line}' if line else ''} with {type(error).__name__}"


def _reads_parts(template: str) -> bool:
    """Return whether a template loops over the parts of a message. vLLM passes parts, not text, to such a template."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        parsed = _compile_jinja_template(template).environment.parse(template)
    except Exception as error:  # see _render
        raise TemplateFailure(_reason(error)) from error
    for loop in parsed.find_all(jinja2.nodes.For):
        iterated = loop.iter
        while isinstance(iterated, jinja2.nodes.Filter) and iterated.node:
            iterated = iterated.node
        is_name = isinstance(iterated, jinja2.nodes.Name) and iterated.name == "content"
        is_attribute = isinstance(iterated, jinja2.nodes.Getattr) and iterated.attr == "content"
        key = iterated.arg if isinstance(iterated, jinja2.nodes.Getitem) else None
        if is_name or is_attribute or (isinstance(key, jinja2.nodes.Const) and key.value == "content"):
            return True
    return False


def _parts(message: Message) -> list[dict[str, Any]]:
    if not message["content"] and message["role"] == "assistant":
        return []  # beside tool calls, clients send no content rather than an empty text
    return [{"type": "text", "text": text} for text in _texts(message)]


def _text(message: Message) -> str:
    """Return the text of a message, joined as vLLM does for a template that reads parts."""
    return "\n".join(_texts(message))


def _texts(message: Message) -> list[str]:
    return message.get(TEXT_PARTS, [message["content"]])
