"""Find where assistant turns begin and end in the text that a chat template renders."""

import contextlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from raymill.data.examples import Conversation, Message
from raymill.data.template_probes import ANSWER, QUESTION
from raymill.data.template_renderer import TemplateFailure, TemplateRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MISMATCH = "its answers do not begin with its generation prompt"
REASONING_TAG = re.compile(r"<(\w+)>\s*")  # a tag with which a generation prompt opens the reasoning


class AssistantTurns:
    """Extracts what the model writes in an assistant turn: the text after the prompt, including the stop token."""

    def __init__(self, renderer: TemplateRenderer, eos_ids: Iterable[int], *, has_marks: bool) -> None:
        """`eos_ids` are the model's stop tokens. `has_marks` says whether the template marks what to train.

        Raises: TemplateFailure if the template cannot render a question and an answer.
        """
        self.eos_ids = sorted(set(eos_ids))
        """Stop tokens of the trained model. `learn_end` may add one."""
        self.stops: tuple[str, ...] = ()
        """Stop tokens as text, set by `learn_end`."""
        self._renderer = renderer
        self._has_marks = has_marks
        # how the generation prompt begins the reasoning, and what a conversation without reasoning has instead
        self._opening = self._in_conversation = ""
        self._header = ""  # the generation prompt: what a prompt adds to its messages
        # the stop token to add to turns that the template ends without one; the key says whether the turn calls tools
        self._missing_end = {True: "", False: ""}
        self._learn_reasoning()

    def learn_end(self, tokenizer: "PreTrainedTokenizerFast", probe: Conversation, following: Message) -> bool:
        """Learn which stop token ends the last turn of `probe`, and return whether there is such a token.

        The token is in the turn, or the text of `following` begins with it. Otherwise, an added token right after the
        answer becomes a new stop token.
        """
        written = self._written(probe)
        tokens = (tokenizer.convert_ids_to_tokens(token_id) for token_id in self.eos_ids)
        eos = [token for token in tokens if token]  # a model may stop at ids that its tokenizer lacks
        if any(stop in written for stop in eos):
            self.stops = tuple(eos)
            return True
        if self._has_marks:
            after = ""
        else:
            continued = self._renderer.conversation(Conversation([*probe.messages, following], probe.tools))
            after = continued.partition(written)[2]
        if stop := next((stop for stop in eos if after.startswith(stop)), None):  # GLM stops at the next role's token
            self.stops = tuple(eos)
            self._missing_end[bool(probe.messages[-1].get("tool_calls"))] = stop
            return True
        answer = str(probe.messages[-1]["content"])
        ids = tokenizer.encode(written.partition(answer)[2], add_special_tokens=False) if answer else []
        if ids and ids[0] in tokenizer.get_added_vocab().values():  # a base model learns to stop at this token
            self.eos_ids = sorted([*self.eos_ids, ids[0]])
            self.stops = (*eos, tokenizer.convert_ids_to_tokens(ids[0]))
            return True
        return False

    def text(self, prompt: str, conversation: Conversation) -> str:
        """Return the last message as the assistant writes it after `prompt`, including the stop token.

        Raises:
            TemplateFailure: the prompts in serving would differ from those in training.
        """
        message = conversation.messages[-1]
        whole = self._renderer.conversation(conversation)
        written = whole.removeprefix(prompt)
        if not whole.startswith(prompt):
            if (unclosed := self._without_end(prompt)) and whole.startswith(unclosed):
                written = whole.removeprefix(unclosed)
            elif self._opening:
                written = self._after_reasoning(prompt, whole, message.get("reasoning_content", ""))
            else:
                written = _after_last_message(prompt, whole, conversation.messages[-2])
        return self.until_stop(written) or written + self._missing_end[bool(message.get("tool_calls"))]

    def until_stop(self, text: str) -> str:
        """Return the text up to and including the first stop token, or an empty string if there is none."""
        ends = [text.find(stop) + len(stop) for stop in self.stops if stop in text]
        return text[: min(ends, default=0)]

    def stop_in(self, message: Message) -> str | None:
        """Return a stop token that the message contains, or None. Only assistant messages are checked."""
        if message["role"] != "assistant":
            return None
        texts = (message["content"], message.get("reasoning_content", ""))
        return next((stop for stop in self.stops if any(stop in text for text in texts)), None)

    def _written(self, probe: Conversation) -> str:
        """Return the trained text of the last turn."""
        if self._has_marks:
            text, spans = self._renderer.marked(probe, self._renderer.template)
            return text[slice(*spans[-1])] if spans else ""
        return self.text(self._renderer.prompt(Conversation(probe.messages[:-1], probe.tools)), probe)

    def generation_start(self, text: str, start: int) -> int:
        """Return where the model begins to generate in a marked span of `text` that begins at `start`.

        A mark may include the end of the generation prompt, such as <think>.
        """
        size = len(self._header)
        at = text.rfind(self._header, max(0, start - size), start + size) if size else -1
        return max(start, at + size)

    def _learn_reasoning(self) -> None:
        """Learn how the generation prompt begins the reasoning, if answers in a conversation begin differently."""
        prompt = self._renderer.prompt(Conversation([QUESTION]))
        with contextlib.suppress(TemplateFailure):  # a template may demand an answer
            self._header = prompt.partition(self._renderer.conversation(Conversation([QUESTION])))[2]
        before, _, _ = self._renderer.conversation(Conversation([QUESTION, ANSWER])).partition(ANSWER["content"])
        if not before.startswith(prompt):
            pairs = zip(prompt, before, strict=False)
            header = prompt[: next((at for at, (one, other) in enumerate(pairs) if one != other), len(before))]
            if header.rfind("<") > header.rfind(">"):  # the texts diverge within a tag
                header = header[: header.rfind("<")]
            self._opening, self._in_conversation = prompt.removeprefix(header), before.removeprefix(header)

    def _without_end(self, prompt: str) -> str:
        """Return a prompt without the end of its last turn, or an empty string if it does not end with a turn.

        If text follows a tool's result, Gemma 4's prompt ends that turn, but the conversation continues it.
        """
        prompt = prompt.rstrip()
        return next((prompt.removesuffix(stop) for stop in self.stops if prompt.endswith(stop)), "")

    def _after_reasoning(self, prompt: str, whole: str, reasoning: str) -> str:
        """Return the text after a prompt that begins the reasoning differently from the conversation."""
        header = prompt.removesuffix(self._opening)
        if header == prompt or not whole.startswith(header + self._in_conversation):
            raise TemplateFailure(MISMATCH)
        answer = whole.removeprefix(header + self._in_conversation)
        tag = REASONING_TAG.fullmatch(self._opening)
        closing = f"</{tag[1]}>" if tag else ""
        if not self._opening.strip() or (closing and self._in_conversation == closing):  # Nemotron 3, GLM 4.7
            return self._in_conversation + answer
        if tag and not self._in_conversation:  # DeepSeek R1 drops the reasoning from the conversation
            return f"{reasoning}\n{closing}\n\n{answer}"
        if "/" in self._opening or self._opening.count("<") > 1:  # Gemma 4 closes the reasoning in the prompt
            return answer
        raise TemplateFailure(MISMATCH)


def _after_last_message(prompt: str, whole: str, last: Message) -> str:
    """Return the text of `whole` after the prompt. Only the prompt's text from its last message on must match.

    For example, Mistral puts the system prompt and the tools into the last user message only while it has no answer.
    """
    start = prompt.rfind(last["content"]) if last["content"] else -1
    end = whole.rfind(prompt[start:]) if start >= 0 else -1
    if end < 0:
        raise TemplateFailure(MISMATCH)
    return whole[end + len(prompt) - start :]
