"""Render conversations with a model's own chat template, and find what the assistant writes in the text.

An assistant turn is the text that the template adds to the prompt a server would render: the messages up to and
including the turn, minus the messages before it with the generation prompt. So training sees the same prefix as the
served model, for any template. Some templates render earlier turns differently later: Qwen3 drops their reasoning. Then
each turn gets a document of its own.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jinja2

import settings
from pipeline.data import layout
from pipeline.data.layout import Conversation, Message, Rendered
from pipeline.data.options import PastReasoning, Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_LAYOUTS = 10_000  # kept in memory; the template renders all further shapes of conversations
MISMATCH = "its answers do not begin with its generation prompt"
OPENED = re.compile(r"<(\w+)>\s*")  # a generation prompt that opens the reasoning
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
CHATML = "pipeline/data/chat_templates/chatml.jinja"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""Errors that templates raise on unexpected messages."""


class Rejected(Exception):
    """The template cannot render a conversation, or would drop part of it."""


# ---------------------------------------------------------------- probes

QUESTION: Message = {"role": "user", "content": "probe-question"}
ANSWER: Message = {"role": "assistant", "content": "probe-answer"}
NEXT: Message = {"role": "user", "content": "probe-next"}
NEXT_ANSWER: Message = {"role": "assistant", "content": "probe-last"}
THINKING: Message = {"role": "assistant", "reasoning_content": "probe-reasoning", "content": "probe-answer"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",  # Mistral takes nine letters or digits
            "function": {"arguments": {"probe_key": "probe-value"}, "name": "probe_call"},
            "type": "function",
        }
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "name": "probe_call", "content": "probe-result"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_call",
        "description": "probe-description",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "a key"}}},
    },
}
FEATURES: dict[str, tuple[Conversation, tuple[str, ...]]] = {
    "a system message": (
        Conversation([{"role": "system", "content": "probe-system"}, QUESTION, ANSWER]),
        ("probe-system",),
    ),
    "a developer message": (
        Conversation([{"role": "developer", "content": "probe-system"}, QUESTION, ANSWER]),
        ("probe-system",),
    ),
    "reasoning": (Conversation([QUESTION, THINKING]), ("probe-reasoning", "probe-answer")),
    "tools": (Conversation([QUESTION, ANSWER], [TOOL]), ("probe-description",)),
    "tool calls": (Conversation([QUESTION, CALL], [TOOL]), ("probe_call", "probe_key", "probe-value")),
    "tool calls beside text": (
        Conversation([QUESTION, CALL | {"content": "probe-answer"}], [TOOL]),
        ("probe-answer", "probe_call", "probe-value"),
    ),
    "tool results": (Conversation([QUESTION, CALL, RESULT, ANSWER], [TOOL]), ("probe-result", "probe-answer")),
}
"""Optional parts of a conversation. Each has a probe and the strings that its rendered text must contain."""


def features(conversation: Conversation) -> Iterator[str]:
    """Yield the keys of FEATURES that apply to a conversation."""
    if conversation.tools:
        yield "tools"
    for message in conversation.messages:
        match message["role"]:
            case "system" | "developer" | "tool" as role:
                yield "tool results" if role == "tool" else f"a {role} message"
        if message.get("reasoning_content"):
            yield "reasoning"
        if message.get("tool_calls"):
            yield "tool calls beside text" if message.get("content") else "tool calls"


def _marked_by_trl(tokenizer: "PreTrainedTokenizerFast") -> str | None:
    """Return TRL's marked version of a template, which keeps earlier reasoning, or None if TRL has none."""
    from trl.chat_template_utils import get_training_chat_template  # here: it takes three seconds

    try:
        return get_training_chat_template(tokenizer)
    except ERRORS:  # TRL raises ValueError for a template that it does not know
        return None


def _after_ending(prompt: str, whole: str, before: Message) -> str:
    """Return the text after the last message of `prompt`, where the rest of `prompt` is not in `whole`.

    Mistral puts the system prompt and the tools into the last user message, and drops them once it is answered.
    """
    start = prompt.rfind(before["content"]) if before["content"] else -1
    end = whole.rfind(prompt[start:]) if start >= 0 else -1
    if end < 0:
        raise ValueError(MISMATCH)
    return whole[end + len(prompt) - start :]


def _with_developer_as_system(messages: list[Message]) -> list[Message]:
    """Merge system and developer messages into one, as vLLM does for templates without a developer role."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    instructions = [message for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message not in instructions]
    return [{"role": "system", "content": "\n\n".join(message["content"] for message in instructions)}, *others]


def _reads_parts(template: str) -> bool:
    """Return whether a template loops over the parts of a message. vLLM then passes parts instead of text."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    for loop in _compile_jinja_template(template).environment.parse(template).find_all(jinja2.nodes.For):
        over = loop.iter
        while isinstance(over, jinja2.nodes.Filter) and over.node:
            over = over.node
        named = isinstance(over, jinja2.nodes.Name) and over.name == "content"
        attribute = isinstance(over, jinja2.nodes.Getattr) and over.attr == "content"
        key = over.arg if isinstance(over, jinja2.nodes.Getitem) else None
        if named or attribute or (isinstance(key, jinja2.nodes.Const) and key.value == "content"):
            return True
    return False


def _with_parts(message: Message) -> Message:
    if message["role"] == "tool":
        return message
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}] if content else []}


def remedy(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return, in words, a chat template that would work."""
    vocabulary = tokenizer.get_vocab()
    if all(token in vocabulary for token in CHATML_TOKENS):
        return CHATML
    return "an instruct model of its family, as a folder or hub id"


def _line(error: Exception) -> str:
    """Return an error's first line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class ChatTemplate:
    """The chat template of a model, as training uses it."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        eos_ids: Iterable[int],
        *,
        given: bool = False,
        turns: Turns = "all",
        past_reasoning: PastReasoning = "served",
    ) -> None:
        """Probe the template of `tokenizer`. The model stops at `eos_ids`. `given`: the user wrote the template.

        Raises:
            settings.UserError: the template is broken, or a model trained with it would never stop.
        """
        self.text: str = tokenizer.chat_template
        self.eos_ids = sorted(set(eos_ids))
        self._turns = turns
        self._special_tokens = dict(tokenizer.special_tokens_map)
        has_marks = bool(MARKS.search(self.text))
        self._has_marks = given and has_marks  # a user's marks say what to train; a model's may include the prompt
        self._marked: str | None = self.text if self._has_marks else None
        if past_reasoning == "keep" and not self._marked:
            self._marked = self.text if has_marks else _marked_by_trl(tokenizer)
        if past_reasoning == "keep" and not self._marked:
            raise settings.UserError(
                f"past_reasoning = keep needs a template with marks, and TRL has none for {tokenizer.name_or_path}; "
                "pass --past-reasoning served."
            )
        self._knows_developer = "'developer'" in self.text or '"developer"' in self.text  # vLLM's own test
        self._reads_parts = False
        self._layouts: dict[object, layout.Layout | None] = {}
        self._stops: tuple[str, ...] = ()
        # how the generation prompt begins the reasoning, and what a conversation without reasoning has instead
        self._opening = self._in_conversation = ""
        # the token that ends a turn where the template writes none; the key: whether the turn calls tools
        self._closing = {True: "", False: ""}
        self._learn_stops(tokenizer)
        with contextlib.suppress(*ERRORS):  # a template without tools may raise
            self._ends(tokenizer, FEATURES["tool calls"][0], RESULT)
        self.dropped = {name for name, (probe, expected) in FEATURES.items() if not self._keeps(probe, expected)}

    def documents(self, conversation: Conversation) -> list[Rendered]:
        """Return the texts to train on. Together they train every assistant turn once.

        Raises:
            Rejected: the template raises, would drop part of the conversation, or an answer contains a stop token.
        """
        lost = next((name for name in features(conversation) if name in self.dropped), None)
        if lost:
            raise Rejected(f"the chat template does not render {lost}")
        self._reject_stops(conversation)
        try:
            return self._documents(conversation)
        except ERRORS as error:
            raise Rejected(f"the chat template refuses it: {_line(error)}") from None

    def batch(self, conversations: list[Conversation]) -> list[list[Rendered] | Rejected]:
        """Return what `documents` returns or raises for each conversation, in a fraction of the time."""
        return [self._fast(conversation) for conversation in conversations]

    def _fast(self, conversation: Conversation) -> list[Rendered] | Rejected:
        shape = layout.shape(conversation)
        if shape is None or any(map(self._stop_in, conversation.messages)):
            return self._documents_or_problem(conversation)
        if shape not in self._layouts:
            if len(self._layouts) == MOST_LAYOUTS:
                return self._documents_or_problem(conversation)
            self._layouts[shape] = self._learn_layout(conversation)
        found = self._layouts[shape]
        return found.fill(conversation) if found else self._documents_or_problem(conversation)

    def _reject_stops(self, conversation: Conversation) -> None:
        for message in conversation.messages:
            if stop := self._stop_in(message):
                raise Rejected(f"an answer contains {stop}, at which the model stops")

    def _stop_in(self, message: Message) -> str | None:
        """Return a stop token that an answer contains, or None."""
        if message["role"] != "assistant":
            return None
        texts = (message["content"], message.get("reasoning_content", ""))
        return next((stop for stop in self._stops if any(stop in text for text in texts)), None)

    def _learn_layout(self, conversation: Conversation) -> layout.Layout | None:
        try:
            return layout.learn(conversation, self.documents)
        except Rejected:
            return None

    def _documents_or_problem(self, conversation: Conversation) -> list[Rendered] | Rejected:
        try:
            return self.documents(conversation)
        except Rejected as problem:
            return problem

    def prompt(self, conversation: Conversation) -> str:
        """Return the text that a server renders for the messages, up to where the assistant begins."""
        return self._render(self.text, conversation, prompt=True).text

    def _documents(self, conversation: Conversation) -> list[Rendered]:
        trained = self._trained(conversation.messages)
        if self._marked:
            return [self._chosen(conversation, trained)]
        return self._compared(conversation, trained)

    def _chosen(self, conversation: Conversation, trained: set[int]) -> Rendered:
        """Return the rendered text with the marked spans of the trained turns."""
        messages, tools = conversation
        text, spans = self._render(self._marked or self.text, conversation)
        skipped = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at not in trained]
        for at in skipped:  # later messages do not change how a marked template renders earlier ones
            start, stop = (
                len(self._render(self._marked or self.text, Conversation(messages[:end], tools)).text)
                for end in (at, at + 1)
            )
            spans = [span for span in spans if not start <= span[0] < stop]
        rendered = Rendered(text, spans)
        return rendered if self._has_marks else self._trimmed(rendered)

    def _trained(self, messages: list[Message]) -> set[int]:
        """Return the positions of the assistant messages that are trained."""
        roles = [message["role"] for message in messages]
        last_user = len(roles) - roles[::-1].index("user") if "user" in roles else 0
        first = last_user if self._turns == "last" else 0
        return {
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and index >= first and message.get("weight") != 0
        }

    def _compared(self, conversation: Conversation, trained: set[int]) -> list[Rendered]:
        """Return documents that contain the prompt a server would render before each trained turn."""
        messages, tools = conversation
        made: list[Rendered] = []
        text, spans = "", []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.prompt(Conversation(messages[:index], tools))
            turn = self._turn(prompt, Conversation(messages[: index + 1], tools))
            if spans and not prompt.startswith(text):
                made.append(Rendered(text, spans))
                spans = []
            text = prompt + turn
            if index in trained:
                spans = [*spans, (len(prompt), len(text))]
        return [*made, Rendered(text, spans)] if spans else made

    def _turn(self, prompt: str, conversation: Conversation) -> str:
        """Return the last message as the assistant writes it after `prompt`, including the stop token."""
        message = conversation.messages[-1]
        whole = self._render(self.text, conversation).text
        written = whole.removeprefix(prompt)
        if not whole.startswith(prompt):
            if self._opening:
                written = self._after_reasoning(prompt, whole, message.get("reasoning_content", ""))
            else:
                written = _after_ending(prompt, whole, conversation.messages[-2])
        return self._ended(written) or written + self._closing[bool(message.get("tool_calls"))]

    def _after_reasoning(self, prompt: str, whole: str, reasoning: str) -> str:
        """Return the text after a prompt that begins the reasoning unlike the conversation."""
        header = prompt.removesuffix(self._opening)
        if header == prompt or not whole.startswith(header + self._in_conversation):
            raise ValueError(MISMATCH)
        answer = whole.removeprefix(header + self._in_conversation)
        opened = OPENED.fullmatch(self._opening)
        closing = f"</{opened[1]}>" if opened else ""
        if not self._opening.strip() or (closing and self._in_conversation == closing):  # Nemotron 3, GLM 4.7
            return self._in_conversation + answer
        if opened and not self._in_conversation:  # DeepSeek R1 drops it from the conversation
            return f"{reasoning}\n{closing}\n\n{answer}"
        if "/" in self._opening or self._opening.count("<") > 1:  # Gemma 4 closes it in the prompt
            return answer
        raise ValueError(MISMATCH)

    def _ended(self, written: str) -> str:
        """Return the text up to and including the first stop token, or an empty string if there is none."""
        ends = [written.find(stop) + len(stop) for stop in self._stops if stop in written]
        return written[: min(ends, default=0)]

    def _render(self, template: str, conversation: Conversation, *, prompt: bool = False) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        marked = template is self._marked and not prompt
        [text], *spans = render_jinja_template(
            [self._as_served(conversation.messages)],
            tools=conversation.tools,
            chat_template=template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=marked,
            **self._special_tokens,
        )
        return Rendered(text, spans[0][0] if marked else [])

    def _as_served(self, messages: list[Message]) -> list[Message]:
        """Return messages as vLLM passes them to the template."""
        if any("weight" in message for message in messages):
            messages = [{key: value for key, value in one.items() if key != "weight"} for one in messages]
        if not self._knows_developer:
            messages = _with_developer_as_system(messages)
        return [_with_parts(message) for message in messages] if self._reads_parts else messages

    def _trimmed(self, rendered: Rendered) -> Rendered:
        """Cut the text after the last stop token, end each span at its stop token, and merge adjacent spans."""
        spans: list[tuple[int, int]] = []
        for start, stop in rendered.spans:
            if spans and spans[-1][1] == start:
                start, _ = spans.pop()
            spans.append((start, stop))
        spans = [(start, start + len(self._ended(rendered.text[start:stop])) or stop) for start, stop in spans]
        return Rendered(rendered.text[: spans[-1][1]], spans) if spans else rendered

    def _learn_stops(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Find the tokens that end an assistant turn.

        Raises:
            settings.UserError: the template is broken, or its turns do not end in a stop token.
        """
        name = tokenizer.name_or_path
        try:
            self._reads_parts = _reads_parts(self.text)
            self._learn_reasoning()
            stops = self._ends(tokenizer, Conversation([QUESTION, ANSWER]), NEXT)
        except ERRORS as error:
            raise settings.UserError(
                f"the chat template of {name} cannot be used ({_line(error)}); correct chat_template in [preprocess]."
            ) from None
        if not stops:
            shown = self._render(self._marked or self.text, Conversation([QUESTION, ANSWER])).text
            raise settings.UserError(
                f"a model trained with this chat template would never stop: no stop token of {name} follows the answer "
                f"in {shown!r}; set chat_template in [preprocess] to {remedy(tokenizer)}."
            )

    def _ends(self, tokenizer: "PreTrainedTokenizerFast", probe: Conversation, following: Message) -> bool:
        """Learn which token ends the last turn of `probe`: its own, or that of `following`. Return whether one does."""
        written = self._written(probe)
        tokens = (tokenizer.convert_ids_to_tokens(one) for one in self.eos_ids)
        eos = [token for token in tokens if token]  # a model may stop at ids that its tokenizer lacks
        if any(stop in written for stop in eos):
            self._stops = tuple(eos)
            return True
        if self._has_marks:
            after = ""
        else:
            followed = self._render(self.text, Conversation([*probe.messages, following], probe.tools)).text
            after = followed.partition(written)[2]
        if stop := next((stop for stop in eos if after.startswith(stop)), None):  # GLM: the next role's token
            self._stops = tuple(eos)
            self._closing[bool(probe.messages[-1].get("tool_calls"))] = stop
            return True
        ids = tokenizer.encode(written.partition(str(probe.messages[-1]["content"]))[2], add_special_tokens=False)
        added = tokenizer.get_added_vocab().values()
        if ids and ids[0] in added:  # a base model with a chat template: training makes it stop there
            self.eos_ids = sorted([*self.eos_ids, ids[0]])
            self._stops = (*eos, tokenizer.convert_ids_to_tokens(ids[0]))
            return True
        return False

    def _learn_reasoning(self) -> None:
        """Learn how a generation prompt begins the reasoning, where a conversation does not begin an answer with it."""
        prompt = self.prompt(Conversation([QUESTION]))
        before, _, _ = self._render(self.text, Conversation([QUESTION, ANSWER])).text.partition(ANSWER["content"])
        if not before.startswith(prompt):
            pairs = zip(prompt, before, strict=False)
            header = prompt[: next((at for at, (one, other) in enumerate(pairs) if one != other), len(before))]
            if header.rfind("<") > header.rfind(">"):  # they part within a tag
                header = header[: header.rfind("<")]
            self._opening, self._in_conversation = prompt.removeprefix(header), before.removeprefix(header)

    def _written(self, probe: Conversation) -> str:
        """Return the trained text of the last turn."""
        if self._has_marks:
            text, spans = self._render(self.text, probe)
            return text[slice(*spans[-1])] if spans else ""
        return self._turn(self.prompt(Conversation(probe.messages[:-1], probe.tools)), probe)

    def _keeps(self, probe: Conversation, expected: tuple[str, ...]) -> bool:
        """Return whether the text of a probe contains all expected strings and ends in a stop token."""
        try:
            text, spans = self._documents(probe)[-1]
        except ERRORS:
            return False
        end = spans[-1][1] if spans else 0
        return text[:end].rstrip().endswith(self._stops) and all(words in text for words in expected)
