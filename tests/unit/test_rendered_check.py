"""Test that each text of a row is trained, or is part of the prompt, exactly once. Otherwise the row is rejected."""

import functools
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from families import FAMILIES, Family, add_tokens, template_of
from transformers import PreTrainedTokenizerFast

from raymill.data.chat_template import ChatTemplate, TemplateRejection
from raymill.data.examples import Conversation, Message
from raymill.data.template_renderer import RenderedText

MORE_FAMILIES = FAMILIES | {
    "EXAONE 4": Family("LGAI-EXAONE-EXAONE-4.0-32B", ("[|endofturn|]",)),
    "Kimi K2 Thinking": Family("moonshotai-Kimi-K2-Thinking", ("<|im_end|>",)),
    "Nemotron Nano 2": Family("NVIDIA-Nemotron-Nano-v2", ("<SPECIAL_12>",)),
    "Motif 2": Family("Motif-Technologies-Motif-2-12.7B-Reasoning", ("<|endofturn|>", "<|endoftext|>")),
    "QwQ": Family("Qwen-QwQ-32B", ("<|im_end|>",)),
}
QUESTION = {"role": "user", "content": "One?"}
THOUGHT = {"role": "assistant", "content": "<think>\nHmm.\n</think>\n\nFirst."}
ANSWER, SECOND_ANSWER = ({"role": "assistant", "content": text} for text in ("First.", "Second."))
CITY = 'S\u00e3o "Paulo"\n<b>it\'s</b> & C:\\temp'
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "?", "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]

Load = Callable[..., ChatTemplate]


@pytest.fixture(scope="module")
def load(assets: Path) -> Load:
    """Return a function that returns the template of a family."""

    @functools.cache
    def load(family: Family, **options: Any) -> ChatTemplate:
        tokenizer = add_tokens(PreTrainedTokenizerFast.from_pretrained(assets / "model"), family)
        tokenizer.chat_template = template_of(family)
        return ChatTemplate(tokenizer, tokenizer.convert_tokens_to_ids([*family.eos, tokenizer.eos_token]), **options)

    return load


@pytest.fixture(scope="module")
def chatml_like(assets: Path) -> Callable[..., ChatTemplate]:
    """Return a function that returns a template of the user's, with `expression` as the text of each message."""

    def chatml_like(expression: str, marks: tuple[str, str] = ("", "")) -> ChatTemplate:
        begin, end = marks
        tokenizer = PreTrainedTokenizerFast.from_pretrained(assets / "model")
        tokenizer.chat_template = (
            "{% for message in messages %}<|{{ message.role }}|>"
            f"{{% if message.role == 'assistant' %}}{begin}{{{{ {expression} }}}}<|eos|>{end}"
            "{% else %}{{ message.content }}<|eos|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        return ChatTemplate(tokenizer, [tokenizer.eos_token_id], user_defined=True)

    return chatml_like


def call(number: int, name: str = "weather", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def calls(*made: dict[str, Any], content: str = "") -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(made)}


def result(number: int, content: str = "sunny") -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "weather", "content": content}


def reason(template: ChatTemplate, *messages: Message) -> str | None:
    """Return why the template rejects a conversation, or None."""
    tools = TOOLS if any("tool_calls" in message for message in messages) else None
    [made] = template.batch([Conversation(list(messages), tools)])
    return str(made) if isinstance(made, TemplateRejection) else None


# ---------------------------------------------------------------- what is rejected

CUT = "drops text before or after a tag in an answer"
OWN_TAG = "writes <think> before an answer that has its own"
ONE_INSTRUCTION = "renders only one of several system and developer messages; join them into the first message"
LATE_INSTRUCTION = "drops a system message after other messages; move it to the start"
ONE_CALL = "renders only one tool call of a message; put each call into a message of its own, followed by its result"
SYSTEM = {"role": "system", "content": "Be brief."}
LATE_SYSTEM = [QUESTION, ANSWER, {"role": "system", "content": "Be long."}, {"role": "user", "content": "Two?"}]
PARALLEL = [QUESTION, calls(call(1, city="Rome"), call(2, city="Rome")), result(1), result(2), ANSWER]
CLOSED_ONLY = {"role": "assistant", "content": "Hmm.\n</think>\n\nFirst."}
MENTIONED = {"role": "assistant", "content": "Write <think> and </think> around it."}
REJECTED: list[tuple[str, list[Message], str]] = [
    ("DeepSeek V3.1", [QUESTION, THOUGHT], f"{CUT}; remove the reasoning of the answer, or set chat_template in"),
    ("DeepSeek V3.1", [QUESTION, ANSWER, QUESTION, THOUGHT], CUT),
    ("EXAONE 4", [QUESTION, THOUGHT], CUT),
    ("DeepSeek R1", [QUESTION, CLOSED_ONLY], f"{CUT}; move the reasoning of the answer, without its tags, into"),
    ("DeepSeek R1", [QUESTION, THOUGHT | {"reasoning_content": "Well."}], CUT),
    ("Qwen 3", [QUESTION, MENTIONED], CUT),
    ("Kimi K2 Thinking", [QUESTION, THOUGHT], OWN_TAG),
    ("QwQ", [QUESTION, THOUGHT], OWN_TAG),
    ("QwQ", [QUESTION, CLOSED_ONLY], OWN_TAG),
    ("Qwen 3", [QUESTION, THOUGHT | {"reasoning_content": "Well."}], OWN_TAG),
    ("Nemotron Nano 2", [QUESTION, THOUGHT], "already ends with <think>; remove <think> from the start of the answer"),
    ("Nemotron Nano 2", [QUESTION, ANSWER], "ends with <think>, which the answer does not close; begin the answer"),
    ("Nemotron Nano 2", [QUESTION, CLOSED_ONLY, CLOSED_ONLY], "drops text before or after a tag in an answer"),
    (
        "Motif 2",
        [QUESTION, ANSWER | {"reasoning_content": "Well."}],
        "already ends with <think>; set chat_template in [preprocess]",
    ),
    ("gpt-oss", PARALLEL, ONE_CALL),
    ("gpt-oss", [SYSTEM, {"role": "developer", "content": "Be kind."}, QUESTION, ANSWER], ONE_INSTRUCTION),
    *((name, [SYSTEM, *LATE_SYSTEM, ANSWER], ONE_INSTRUCTION) for name in ("gpt-oss", "SmolLM3", "MiniMax M2")),
    ("DeepSeek R1 Distill", [SYSTEM, *LATE_SYSTEM, ANSWER], ONE_INSTRUCTION),
    *((name, [*LATE_SYSTEM, ANSWER], LATE_INSTRUCTION) for name in ("gpt-oss", "SmolLM3", "MiniMax M2")),
    ("Kimi K2", [QUESTION, calls(call(1)), result(1), ANSWER], "renders the id of a tool call, but not its name"),
]


@pytest.mark.parametrize(("name", "messages", "expected"), REJECTED)
def test_a_row_is_rejected_if_its_template_loses_a_text(
    load: Load, name: str, messages: list[Message], expected: str
) -> None:
    found = reason(load(MORE_FAMILIES[name]), *messages)
    assert found
    assert expected in found


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("message.content + ' ' + message.content", "renders an answer twice"),
        ("message.content | truncate(30)", "the chat template drops"),
        ("'' if loop.previtem and loop.previtem.role == 'assistant' else message.content", "two assistant messages"),
        ("message.content | trim", None),
    ],
)
def test_each_answer_is_rendered_once(
    chatml_like: Callable[..., ChatTemplate], expression: str, expected: str | None
) -> None:
    found = reason(chatml_like(expression), QUESTION, ANSWER, SECOND_ANSWER | {"content": "word " * 20})
    assert (expected in found) if found and expected else found == expected


def test_marks_may_leave_out_part_of_an_answer_but_not_lose_it(chatml_like: Callable[..., ChatTemplate]) -> None:
    marks = ("{% generation %}", "{% endgeneration %}")
    assert reason(chatml_like("message.content", marks), QUESTION, ANSWER) is None
    found = reason(chatml_like("message.content | truncate(30)", marks), QUESTION, ANSWER | {"content": "word " * 20})
    assert found
    assert "drops text of a message with the role assistant" in found


# ---------------------------------------------------------------- what is not rejected

FINE: dict[str, list[Message]] = {
    "white space and code": [
        {"role": "system", "content": '  You are "kind".\n\nBe brief. '},
        {"role": "user", "content": " def f(x):\n    return x < 3 & x > 1\n"},
        {"role": "assistant", "content": "```python\nprint('<b>hi</b>')\n```\n\n| a | b |\n"},
        {"role": "user", "content": "caf\u00e9 \u6f22\u5b57 [INST] \\n"},
        {"role": "assistant", "content": '  {"json": [1, 2]} '},
    ],
    "the same text everywhere": [{"role": "system", "content": "a"}] + [QUESTION | {"content": "a"}, ANSWER] * 3,
    "a tag that is mentioned": [QUESTION, ANSWER | {"content": "Use <think> to open it. <br> is another."}],
    "an answer in tags": [QUESTION, ANSWER | {"content": "<answer>42</answer>"}, QUESTION, SECOND_ANSWER],
    "a switch": [{"role": "system", "content": "Be brief. /no_think"}, QUESTION | {"content": "Hm? /no_think"}, ANSWER],
    "an untrained answer": [QUESTION, ANSWER | {"weight": 0}, QUESTION, SECOND_ANSWER],
    "reasoning": [QUESTION, ANSWER | {"reasoning_content": "So.\n"}] * 2,
    "empty reasoning": [QUESTION, ANSWER | {"content": "<think>\n\n</think>\n\nFirst."}],
    "two questions": [QUESTION, {"role": "user", "content": "Or two?"}, ANSWER],
    "a call": [
        QUESTION,
        calls(call(1, city=CITY, days=3, share=1e-7, hot=True, tags=["a", "b c"], deep={"k": [{"z": "last"}]})),
        result(1, '{"sky": "caf\u00e9", "list": [1, 2]}'),
        ANSWER,
    ],
    "a call with text": [QUESTION, calls(call(1, city="Rome"), content="Wait."), result(1), ANSWER, QUESTION, ANSWER],
    "two calls": PARALLEL,
    "an argument that contains the name": [QUESTION, calls(call(1, city="1 weather", n=1)), result(1), ANSWER],
}
EXPECTED = {
    ("gpt-oss", "two calls"): ONE_CALL,
    ("QwQ", "empty reasoning"): OWN_TAG,
    ("Kimi K2 Thinking", "empty reasoning"): OWN_TAG,
    ("Qwen 3.5", "a switch"): None,
}


@pytest.mark.parametrize("name", sorted(MORE_FAMILIES.keys() - {"Nemotron Nano 2", "Motif 2"}))
def test_ordinary_rows_are_not_rejected(load: Load, name: str) -> None:
    template = load(MORE_FAMILIES[name])
    for title, messages in FINE.items():
        found = reason(template, *messages)
        if expected := EXPECTED.get((name, title)):
            assert found
            assert expected in found
        elif name.startswith("Kimi") and any("tool_calls" in message for message in messages):
            assert found
            assert "the id of a tool call" in found
        else:
            supported = found is None or re.match(
                "the chat template (does not render|cannot render the messages)", found
            )
            assert supported, f"{title}: {found}"


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_in_tags_is_rendered_like_reasoning_in_a_field(load: Load, name: str) -> None:
    """Otherwise R1 would drop it, Qwen 3.8 would open it twice, and gpt-oss would write it into the answer."""
    template = load(FAMILIES[name])
    if "reasoning" in template.dropped:
        pytest.skip("this template renders no reasoning")
    for text in (
        "<think>\nHmm.\n</think>\n\nFirst.",
        "<think>Hmm.</think>First.",
        "\n<think>\n Hmm.\n\n</think>First.",
    ):
        tagged = {"role": "assistant", "content": text}
        separate = {"role": "assistant", "content": "First.", "reasoning_content": "Hmm."}
        expected = template.documents(Conversation([QUESTION, separate, QUESTION, separate | {"content": "Second."}]))
        second = tagged | {"content": text.replace("First", "Second")}
        assert template.documents(Conversation([QUESTION, tagged, QUESTION, second])) == expected


# ---------------------------------------------------------------- the rule, for random conversations


def words(prefix: str) -> Iterator[str]:
    """Yield texts, each with a word of its own."""
    return (f"{prefix}{number}q" for number in count())


def random_conversation(random: Random) -> Conversation:
    """Return a conversation of any shape that rows have. No text is part of another one."""
    word = words("w")
    messages: list[Message] = []
    if random.random() < 0.4:
        messages.append({"role": random.choice(("system", "developer")), "content": next(word)})
    for _ in range(random.randint(1, 3)):
        if random.random() < 0.2:
            messages.append({"role": random.choice(("system", "developer")), "content": next(word)})
        messages.append({"role": "user", "content": next(word)})
        if random.random() < 0.3:
            messages += random_calls(random, word)
        for _ in range(1 + (random.random() < 0.2)):
            messages.append(random_answer(random, word))
    has_calls = any("tool_calls" in message for message in messages)
    return Conversation(messages, TOOLS if has_calls else None)


def random_calls(random: Random, word: Iterator[str]) -> list[Message]:
    made = [call(number, next(word), **{next(word): next(word)}) for number in range(1, random.randint(2, 3))]
    if random.random() < 0.5:
        made = [each | {"id": f"functions.{each['function']['name']}:0"} for each in made]
    results = [result(0, next(word)) | {"tool_call_id": each["id"], "name": each["function"]["name"]} for each in made]
    return [calls(*made, content=random.choice(("", next(word)))), *results]


def random_answer(random: Random, word: Iterator[str]) -> Message:
    text = random.choice(("{}", "{}", "<think>\n{}\n</think>\n\n{}", "<think>{}</think>{}", "{}\n</think>\n\n{}"))
    message: Message = {"role": "assistant", "content": text.format(next(word), next(word))}
    if random.random() < 0.2:
        message["reasoning_content"] = next(word)
    return message | ({"weight": 0} if random.random() < 0.1 else {})


def wrong_words(conversation: Conversation, documents: list[RenderedText]) -> list[str]:
    """Return the words that are not in their own span of the texts, once."""
    trained = [text[start:stop] for text, spans in documents for start, stop in spans]
    prompts = [text[:start] for text, spans in documents for start, _ in spans]
    answers = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    answers = [at for at in answers if conversation.messages[at].get("weight") != 0]
    wrong = [] if len(trained) == len(answers) else ["a turn"]
    for at, prompt, turn in zip(answers, prompts, trained, strict=False):
        own = re.findall(r"w\d+q", str(conversation.messages[at]))
        ids = re.findall(r"w\d+q", str([each["id"] for each in conversation.messages[at].get("tool_calls", [])]))
        wrong += [word for word in own if turn.count(word) != 1 and not (word in ids and turn.count(word) == 2)]
        wrong += [word for word in re.findall(r"w\d+q", turn) if word not in own]
        context = [
            message for message in conversation.messages[:at] if message["role"] in ("system", "developer", "user")
        ]
        wrong += [message["content"] for message in context if prompt.count(message["content"]) != 1]
        tail = re.split(r"w\d+q", prompt)[-1] + turn
        wrong += ["<think>"] if tail.count("<think>") > 1 or tail.count("</think>") > 1 else []
    return wrong


@pytest.mark.parametrize("name", MORE_FAMILIES)
def test_each_text_is_in_its_own_span_once_or_the_row_is_rejected(load: Load, name: str) -> None:
    template, random = load(MORE_FAMILIES[name]), Random(name)
    conversations = [random_conversation(random) for _ in range(150)]
    good = 0
    for conversation, made in zip(conversations, template.batch(conversations), strict=True):
        if not isinstance(made, TemplateRejection):
            good += 1
            assert not wrong_words(conversation, made), (conversation, made)
    assert good > 2, "nearly all conversations are rejected"
