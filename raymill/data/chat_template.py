"""Render conversations with a model's own chat template, and find the text that the assistant writes.

Unless marks in a template say what to train, an assistant turn is the difference between two renderings: the messages
up to and including the turn, and the prompt that a server would render before it. So training sees the same prefix as
the served model. Some templates render a turn differently once a later turn follows. For example, Qwen3 then drops the
reasoning. With such a template, a conversation becomes several documents.
"""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from raymill.data import rendered_check
from raymill.data.assistant_turns import AssistantTurns
from raymill.data.examples import Conversation, Message
from raymill.data.long_conversations import shorten
from raymill.data.messages import separate_reasoning
from raymill.data.options import PastReasoning, Turns
from raymill.data.template_layout import Layouts
from raymill.data.template_probes import ANSWER, FEATURES, NEXT, QUESTION, RESULT, features
from raymill.data.template_renderer import MARKS, RenderedText, TemplateFailure, TemplateRenderer
from raymill.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHATML = "raymill/data/chat_templates/chatml.jinja"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


class TemplateRejection(Exception):
    """The template cannot be used for a conversation. The message says why."""


def suggestion(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return what to set chat_template to, for an error message."""
    vocabulary = tokenizer.get_vocab()
    if all(token in vocabulary for token in CHATML_TOKENS):
        return CHATML
    return "the folder or hub id of an instruct model of the same family"


class ChatTemplate:
    """The chat template of a model, as training uses it."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        eos_ids: Iterable[int],
        *,
        user_defined: bool = False,
        turns: Turns = "all",
        past_reasoning: PastReasoning = "served",
        sequence_length: int | None = None,
    ) -> None:
        """Probe the template of `tokenizer`. The model stops at `eos_ids`.

        `user_defined` says whether the template replaces the model's own. `batch` leaves out turns that are certain to
        have no token within `sequence_length`.

        Raises:
            UserError: the template is broken or does not support `past_reasoning`, or a model trained with it
                would never stop.
        """
        self.text: str = tokenizer.chat_template
        self._train_last_only = turns == "last"
        has_marks = bool(MARKS.search(self.text))
        # marks in a user's template say what to train; marks in the model's own template may include the prompt
        self._follows_marks = user_defined and has_marks
        self._marked_template = _marked_template(tokenizer, has_marks) if past_reasoning == "keep" else None
        if self._follows_marks:
            self._marked_template = self.text
        self._tokenizer = tokenizer
        self._sequence_length = sequence_length
        self._probe(tokenizer, eos_ids)
        with contextlib.suppress(TemplateFailure):  # a template that does not support tools may raise an error
            self._turns.learn_end(tokenizer, FEATURES["tool calls"][0], RESULT)
        self.dropped = {name for name, (probe, expected) in FEATURES.items() if not self._renders(probe, expected)}
        self._layouts = Layouts(self._marked_template or self.text, self._turns.stops)

    @property
    def eos_ids(self) -> list[int]:
        """Stop tokens of the trained model."""
        return self._turns.eos_ids

    def documents(self, conversation: Conversation) -> list[RenderedText]:
        """Return the texts to train on. Each trained assistant turn is marked in exactly one of them.

        Raises:
            TemplateRejection: the template fails or would drop part of the conversation, or an answer contains a stop
                token.
        """
        conversation = self._with_separate_reasoning(conversation)
        dropped = next((name for name in features(conversation) if name in self.dropped), None)
        if dropped:
            raise TemplateRejection(f"the chat template does not render {dropped}")
        for message in conversation.messages:
            if stop := self._turns.stop_in(message):
                raise TemplateRejection(f"an answer contains {stop}, at which the model stops")
        try:
            documents = self._documents(conversation)
        except TemplateFailure as failure:
            raise TemplateRejection(f"the chat template cannot render the messages: {failure}") from None
        if reason := self._problem(conversation.messages, documents):
            raise TemplateRejection(reason)
        return documents

    def _problem(self, messages: list[Message], documents: list[RenderedText]) -> str | None:
        """Return what is wrong with the documents of a conversation, or None."""
        template = rendered_check.Template(self.text, "reasoning" not in self.dropped, self._follows_marks)
        turns = sorted(self._trained_turns(messages))
        for document in documents:
            count = len(turns) if self._marked_template else len(document.spans)
            trained, turns = turns[:count], turns[count:]
            if trained and (reason := rendered_check.problem(messages, trained, document, template)):
                return reason
        return None

    def batch(self, conversations: list[Conversation]) -> list[list[RenderedText] | TemplateRejection]:
        """Return what `documents` returns or raises for each conversation, in a fraction of the time."""
        shortened = list(map(self._shorten, conversations))
        by_layout = self._layouts.documents(shortened, self._documents_or_rejection)
        return [
            self._documents_or_rejection(conversation)
            if documents is None or any(map(self._turns.stop_in, conversation.messages))
            else documents
            for conversation, documents in zip(shortened, by_layout, strict=True)
        ]

    def with_end(self, conversation: Conversation, document: RenderedText) -> RenderedText:
        """Return a document with what the template writes after the last stop token, such as a line break.

        A reward model reads its score at the end of what `apply_chat_template` returns.
        """
        try:
            whole = self._renderer.conversation(self._with_separate_reasoning(conversation), self._marked_template)
        except TemplateFailure:
            return document
        return document._replace(text=whole) if whole.startswith(document.text) else document

    def _shorten(self, conversation: Conversation) -> Conversation:
        """Leave out turns that are certain to have no token within the sequence length."""
        if not self._sequence_length or self._marked_template:  # marked templates render all turns at once
            return conversation
        return shorten(
            conversation,
            self._sequence_length,
            self._trained_turns(conversation.messages),
            self._renderer,
            self._tokenizer.backend_tokenizer,
        )

    def _with_separate_reasoning(self, conversation: Conversation) -> Conversation:
        """Return the conversation with its reasoning where the template expects it, not in <think> tags."""
        if "reasoning" in self.dropped or not any(
            "</think>" in message["content"] for message in conversation.messages
        ):
            return conversation
        return conversation._replace(messages=[separate_reasoning(message) for message in conversation.messages])

    def _documents_or_rejection(self, conversation: Conversation) -> list[RenderedText] | TemplateRejection:
        try:
            return self.documents(conversation)
        except TemplateRejection as rejection:
            return rejection

    # ---------------------------------------------------------------- texts and masks

    def _documents(self, conversation: Conversation) -> list[RenderedText]:
        trained = self._trained_turns(conversation.messages)
        if self._marked_template:
            return [self._masked_by_marks(conversation, trained, self._marked_template)]
        return self._masked_by_prompts(conversation, trained)

    def _trained_turns(self, messages: list[Message]) -> set[int]:
        """Return the positions of the assistant messages to train on."""
        roles = [message["role"] for message in messages]
        after_last_user = len(roles) - roles[::-1].index("user") if "user" in roles else 0
        first = after_last_user if self._train_last_only else 0
        return {
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and index >= first and message.get("weight") != 0
        }

    def _masked_by_marks(self, conversation: Conversation, trained: set[int], template: str) -> RenderedText:
        """Return the rendered text with the marked spans of the trained turns."""
        messages, tools = conversation
        text, spans = self._renderer.marked(conversation, template)
        skipped = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at not in trained]
        for at in skipped:  # later messages do not change how a marked template renders earlier ones
            start, stop = (
                len(self._renderer.conversation(Conversation(messages[:end], tools), template)) if end else 0
                for end in (at, at + 1)
            )
            spans = [span for span in spans if not start <= span[0] < stop]
        spans = _merge_adjacent(spans)
        starts = [min(stop, self._turns.generation_start(text, start)) for start, stop in spans]
        generated = [(start, stop) for start, (_, stop) in zip(starts, spans, strict=True)]
        if self._follows_marks:  # also train the part of the prompt that is marked
            in_prompt = [(start, stop) for (start, _), stop in zip(spans, starts, strict=True)]
            return RenderedText(text, sorted(span for span in in_prompt + generated if span[0] < span[1]))
        return self._cut_at_stops(RenderedText(text, generated))

    def _masked_by_prompts(self, conversation: Conversation, trained: set[int]) -> list[RenderedText]:
        """Return documents in which each trained turn follows the prompt that a server would render before it."""
        messages, tools = conversation
        documents: list[RenderedText] = []
        text, spans = "", []
        for index in sorted(trained):
            prompt = self._renderer.prompt(Conversation(messages[:index], tools))
            turn = self._turns.text(prompt, Conversation(messages[: index + 1], tools))
            if spans and not prompt.startswith(text):
                documents.append(RenderedText(text, spans))
                spans = []
            text = prompt + turn
            spans = [*spans, (len(prompt), len(text))]
        return [*documents, RenderedText(text, spans)] if spans else documents

    def _cut_at_stops(self, document: RenderedText) -> RenderedText:
        """Cut off text after the last stop token, and end each span at its first stop token."""
        texts = [document.text[start:stop] for start, stop in document.spans]
        spans = [
            (start, start + len(self._turns.until_stop(text) or text))
            for (start, _), text in zip(document.spans, texts, strict=True)
        ]
        return RenderedText(document.text[: spans[-1][1]], spans) if spans else document

    # ---------------------------------------------------------------- probes

    def _probe(self, tokenizer: "PreTrainedTokenizerFast", eos_ids: Iterable[int]) -> None:
        """Find the tokens that end an assistant turn.

        Raises:
            UserError: the template is broken, or its turns do not end in a stop token.
        """
        name = tokenizer.name_or_path
        probe = Conversation([QUESTION, ANSWER])
        try:
            self._renderer = TemplateRenderer(self.text, tokenizer.special_tokens_map)
            self._turns = AssistantTurns(self._renderer, eos_ids, has_marks=self._follows_marks)
            ends = self._turns.learn_end(tokenizer, probe, NEXT)
        except TemplateFailure as failure:
            raise UserError(
                f"the chat template of {name} cannot be used ({failure}); correct chat_template in [preprocess]."
            ) from None
        if not ends:
            text = self._renderer.conversation(probe, self._marked_template)
            raise UserError(
                f"a model trained with this chat template would never stop: no stop token of {name} follows the answer "
                f"in {text!r}; set chat_template in [preprocess] to {suggestion(tokenizer)}."
            )

    def _renders(self, probe: Conversation, expected: tuple[str, ...]) -> bool:
        """Return whether the text of a probe contains all expected strings and ends in a stop token."""
        try:
            text, spans = self._documents(probe)[-1]
        except TemplateFailure:
            return False
        end = spans[-1][1] if spans else 0
        return text[:end].rstrip().endswith(self._turns.stops) and all(string in text for string in expected)


def _merge_adjacent(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            start, _ = merged.pop()
        merged.append((start, stop))
    return merged


def _marked_template(tokenizer: "PreTrainedTokenizerFast", has_marks: bool) -> str:
    """Return the template if it has marks, otherwise TRL's version, which has marks and keeps the earlier reasoning.

    Raises:
        UserError: the template has no marks, and TRL has no version of it.
    """
    marked = tokenizer.chat_template if has_marks else _marked_by_trl(tokenizer)
    if not marked:
        raise UserError(
            f"past_reasoning = keep does not work, because TRL has no training template for {tokenizer.name_or_path}; "
            "pass --past-reasoning served."
        )
    return marked


def _marked_by_trl(tokenizer: "PreTrainedTokenizerFast") -> str | None:
    """Return TRL's training template for this template, or None if TRL has none."""
    from trl.chat_template_utils import get_training_chat_template  # the import takes three seconds

    try:
        return get_training_chat_template(tokenizer)
    except ValueError:  # a template that TRL does not know
        return None
