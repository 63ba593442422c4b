"""Compare the training texts of published chat templates with TRL's masks and vLLM's prompts."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import requests
from families import FAMILIES, Family, add_tokens, template_of, train_tokenizer
from openai_harmony import HarmonyEncodingName, load_harmony_encoding
from transformers import GenerationConfig, GptOssConfig, PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template

from raymill import settings
from raymill.data import template_layout
from raymill.data.chat_template import ChatTemplate, TemplateRejection
from raymill.data.examples import BadRow, Conversation, Message, to_json
from raymill.data.options import Turns
from raymill.data.row_formats import read_example
from raymill.data.template_probes import ANSWER, CALL, FEATURES, NEXT, NEXT_ANSWER, QUESTION, RESULT, THINKING, TOOL
from raymill.data.template_renderer import TemplateRenderer
from raymill.data.tokenization import NOT_TRAINED, DocumentTokenizer, TokenizedDocument
from raymill.errors import UserError
from raymill.generation.prompts import PromptTokenizer, RemainingRows
from raymill.network import free_ports

START_S = 180
MAX_LENGTH = 100_000  # tokens; with the tiny tokenizer, some templates need thousands to describe tools


OTHER_TEXT = {"Gemma 4", "DeepSeek R1", "DeepSeek R1 Distill", "GLM 4.7", "OLMo 3 Think", "MiniMax M2"}
"""Templates that start the reasoning differently in a generation prompt and in a finished conversation. Training uses
the start from the prompt."""

OTHER_TOKENS = {"Qwen 3.5"}
"""Templates with which TRL trains the same text as other tokens. TRL tokenizes prompt and turn as one text, so the line
breaks after <think>, of which the first is in the prompt, become one token."""

NO_END = {"GLM 4", "GLM 4.5, 4.6"}
"""Templates that end a turn only if another message follows."""


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


TWO_TURNS = Conversation([QUESTION, ANSWER, NEXT, NEXT_ANSWER])
TWO_THOUGHTS = Conversation([QUESTION, THINKING, NEXT, THINKING | {"content": "probe-last"}])
CONVERSATIONS = {"two turns": TWO_TURNS, "reasoning in both turns": TWO_THOUGHTS} | {
    name: probe for name, (probe, _) in FEATURES.items()
}
CONVERSATIONS |= {
    "a tool without a description": Conversation(
        [QUESTION, ANSWER], [{"type": "function", "function": {"name": "probe_call"}}]
    ),
    "two calls": Conversation([QUESTION, CALL, RESULT, CALL, RESULT, ANSWER], [TOOL]),
    "reasoning before each call": Conversation(
        [QUESTION, CALL | {"reasoning_content": "probe-reasoning"}, RESULT, THINKING, NEXT, THINKING], [TOOL]
    ),
    "a call with text, then its result": Conversation(
        [QUESTION, CALL | {"content": "probe-text"}, RESULT, ANSWER, NEXT, NEXT_ANSWER], [TOOL]
    ),
    "white space": Conversation([QUESTION, ANSWER | {"content": "\n probe"}, NEXT, ANSWER | {"content": "  two \n"}]),
    "line breaks": Conversation(
        [
            QUESTION | {"content": "\n\nprobe\n"},
            THINKING | {"content": "\n\nprobe\n\n", "reasoning_content": "\nprobe"},
            NEXT,
            ANSWER | {"content": "\n\n\nprobe"},
        ]
    ),
    "answers of one character": Conversation([QUESTION, ANSWER | {"content": "A"}, NEXT, ANSWER | {"content": "."}]),
    "an empty system message": Conversation([{"role": "system", "content": ""}, QUESTION, ANSWER]),
    "an empty system message beside a developer message": Conversation(
        [{"role": "system", "content": ""}, {"role": "developer", "content": "probe-system"}, QUESTION, ANSWER]
    ),
    "a developer message in the middle": Conversation(
        [QUESTION, ANSWER, {"role": "developer", "content": "probe-system"}, NEXT, NEXT_ANSWER]
    ),
    "several text parts": Conversation(
        [
            {"role": "system", "content": parts("one", "two")},
            {"role": "developer", "content": parts("one", "", "two")},
            QUESTION | {"content": parts("one", "\n", "two")},
            CALL | {"content": parts("probe", "text")},
            RESULT | {"content": parts("one", "two")},
            ANSWER | {"content": parts("probe", "-answer")},
            NEXT | {"content": parts("one")},
            NEXT_ANSWER,
        ],
        [TOOL],
    ),
    "parts in questions and answers": Conversation(
        [QUESTION | {"content": parts("one", "two")}, ANSWER | {"content": parts("one", "two")}, NEXT, NEXT_ANSWER]
    ),
}


@pytest.fixture(scope="module")
def folder(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tiny model whose tokenizer has the special tokens of all families."""
    folder = tmp_path_factory.mktemp("families") / "model"
    shutil.copytree(assets / "model", folder)
    texts = (assets / "data" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = add_tokens(train_tokenizer(texts), *FAMILIES.values())
    tokenizer.chat_template = PreTrainedTokenizerFast.from_pretrained(folder).chat_template
    tokenizer.model_max_length = MAX_LENGTH
    assert len(tokenizer.encode("\n\n")) == 1
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LENGTH}))
    return folder


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Iterator[str]:
    """Return the URL of a vLLM server that only renders prompts, without an engine."""
    with rendering(folder) as url:
        yield url


@contextlib.contextmanager
def rendering(folder: Path, parser: str = "hermes") -> Iterator[str]:
    [port] = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "launch", "render", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--trust-request-chat-template"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", parser]  # requests with tools need a parser
    log = folder.with_name("render.log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder.parent)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _is_up(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield url
    finally:
        process.kill()  # after SIGTERM, the server would wait for open connections
        process.wait(START_S)


def _is_up(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


def load(folder: Path, family: Family, **options: Any) -> tuple[ChatTemplate, PreTrainedTokenizerFast]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = template_of(family)
    eos_ids = tokenizer.convert_tokens_to_ids([*family.eos, tokenizer.eos_token])
    return ChatTemplate(tokenizer, eos_ids, **options), tokenizer


def as_row(conversation: Conversation) -> Conversation:
    """Return the conversation as `read_example` reads it from a row."""
    found = read_example({"messages": conversation.messages, "tools": conversation.tools})
    assert isinstance(found, Conversation)
    return found


def as_openai(message: Message) -> Message:
    """Return a message as an OpenAI client sends it."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    reasoning = {"reasoning": message["reasoning_content"]} if "reasoning_content" in message else {}
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "reasoning_content")}
    return kept | reasoning | ({"tool_calls": calls} if calls else {})


def served_prompt(url: str, template: str | None, conversation: Conversation) -> list[int]:
    """Return the tokens that vLLM passes to a model for these messages."""
    body: dict[str, Any] = {"messages": [as_openai(message) for message in conversation.messages]}
    body |= {"max_tokens": 1} | ({"chat_template": template} if template else {})
    if conversation.tools:
        body["tools"] = conversation.tools
    answer = requests.post(f"{url}/v1/chat/completions/render", json=body, timeout=START_S)
    assert answer.ok, answer.text
    return answer.json()["token_ids"]


def prompts(template: ChatTemplate) -> Iterator[tuple[str, Conversation]]:
    """Yield the text and the messages before each trained turn of the CONVERSATIONS that the template supports."""
    for conversation in CONVERSATIONS.values():
        try:
            documents = template.documents(as_row(conversation))
        except TemplateRejection:
            continue
        starts = [document.text[:start] for document in documents for start, _ in document.spans]
        yield from zip(starts, prefixes(conversation), strict=True)


def prefixes(conversation: Conversation) -> list[Conversation]:
    """Return the messages before each assistant turn."""
    messages = conversation.messages
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [conversation._replace(messages=messages[:index]) for index in turns]


def trained_prompts(documents: list[TokenizedDocument]) -> Iterator[list[int]]:
    """Yield the tokens before each trained turn."""
    for document in documents:
        trained = document.labels != NOT_TRAINED
        for start in np.flatnonzero(trained & ~np.roll(trained, 1)):
            yield document.input_ids[:start].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_training_and_generate_see_the_prompts_that_vllm_renders(
    folder: Path, renderer: str, name: str, tmp_path: Path
) -> None:
    template, tokenizer = load(folder, FAMILIES[name])
    tokenizer.chat_template = template.text
    tokenizer.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=template.eos_ids).save_pretrained(tmp_path)
    training, generating = DocumentTokenizer(str(tmp_path), MAX_LENGTH), PromptTokenizer(str(tmp_path), "id", 10**6)
    compared = 0
    for conversation in CONVERSATIONS.values():
        with contextlib.suppress(BadRow):
            for trained, before in zip(
                trained_prompts(training.documents(conversation._asdict())), prefixes(conversation), strict=True
            ):
                served = served_prompt(renderer, template.text, before)
                assert trained == served, tokenizer.decode(trained)
                row = json.dumps({"id": 1, **before._asdict()}).encode()
                generated = generating.prompt(row, RemainingRows(1, frozenset(), frozenset()))
                assert generated
                assert generated["tokenized_prompt"] == served
                compared += 1
    assert compared >= 8


@pytest.mark.skipif(
    "TIKTOKEN_ENCODINGS_BASE" not in os.environ,
    reason="vLLM's Harmony needs o200k_base.tiktoken, which no small package contains; set TIKTOKEN_ENCODINGS_BASE to "
    "a folder with it",
)
def test_gpt_oss_prompts_differ_from_harmony_in_two_places(folder: Path, tmp_path: Path) -> None:
    """For gpt-oss, vLLM renders prompts with Harmony, not with the chat template."""
    template, tokenizer = load(folder, FAMILIES["gpt-oss"])
    model = shutil.copytree(folder, tmp_path / "model")
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    GptOssConfig(**shape, vocab_size=len(tokenizer), head_dim=32).save_pretrained(model)
    harmony = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    compared = list(prompts(template))
    with rendering(model, parser="openai") as url:
        for text, before in compared:
            served = harmony.decode(served_prompt(url, None, before))
            assert (
                text.replace("probe-system\n\n<", "probe-system<").replace('"probe-result"', "probe-result") == served
            )
    assert len(compared) >= 10


@pytest.mark.parametrize("name", FAMILIES)
def test_every_turn_ends_where_the_model_stops(folder: Path, name: str) -> None:
    family = FAMILIES[name]
    template, tokenizer = load(folder, family)
    ends = (*family.eos, tokenizer.eos_token)
    for document in template.documents(TWO_TURNS):
        for start, stop in document.spans:
            assert document.text[start:stop].endswith(ends)
            assert sum(document.text[start:stop].count(token) for token in ends) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_single_turn_has_the_text_that_the_template_renders(folder: Path, name: str) -> None:
    template, tokenizer = load(folder, FAMILIES[name])
    messages = [QUESTION, ANSWER]
    [document] = template.documents(Conversation(messages))
    original = tokenizer.apply_chat_template(messages, tokenize=False)
    if name in OTHER_TEXT:
        assert document.text not in original, "no longer an exception: remove it from OTHER_TEXT"
    elif name in NO_END:
        assert document.text in (f"{original}{token}" for token in FAMILIES[name].eos)
    else:
        assert original.startswith(document.text)


WORDS = (
    *(
        "yes",
        "Sentences, with 12 numbers.",
        "two\n\nparagraphs",
        "\u00e9\u6f22",
        "  spaces  ",
        "line\n",
        "\\n",
        "'quoted'",
    ),
    *("/no_think", "I think so", "<think>\nhm\n</think>\n\nso", "</think>", "<tool_call>", "<|im_end|>", "List<int>"),
    *("[INST]", "[1, 2]", "a [TOOL_CALLS] b", "{}", "x" * 3000, "\ue0000\ue001"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_learned_layout_gives_the_same_text_as_the_template(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_layout, "MAX_RENDERINGS", 0)
    template, _ = load(folder, FAMILIES[name])
    random = Random(name)
    system = {"role": "system", "content": "Be brief."}
    shapes = [
        TWO_TURNS,
        Conversation([system, *TWO_TURNS.messages]),
        Conversation([system | {"content": "Be kind."}, QUESTION, ANSWER]),
    ]
    conversations = [*shapes, *shapes]
    for _ in range(60):
        messages: list[Message] = [{"role": "system", "content": random.choice(WORDS)}] if random.random() < 0.3 else []
        for _ in range(random.randint(1, 3)):
            messages += [{"role": "user", "content": random.choice(WORDS)}, {"role": "assistant", "content": "-"}]
            messages[-1]["content"] = random.choice(WORDS)
            if random.random() < 0.3:
                messages[-1] |= {"reasoning_content": random.choice(WORDS)}
            if random.random() < 0.2:
                messages[-1] |= {"weight": 0}
        conversations.append(Conversation(messages))
    for conversation, made in zip(conversations, template.batch(conversations), strict=True):
        assert str(made) == str(template._documents_or_rejection(conversation))
    used = [layout for layout in template._layouts._layouts.values() if layout]
    assert len(used) >= (2 if "a system message" not in template.dropped else 1), "too few layouts were used"


def rendered_messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each rendering adds the number of its messages."""
    counts: list[int] = []
    render = TemplateRenderer._render

    def count(self: TemplateRenderer, conversation: Conversation, *arguments: Any, **options: Any) -> Any:
        counts.append(len(conversation.messages))
        return render(self, conversation, *arguments, **options)

    monkeypatch.setattr(TemplateRenderer, "_render", count)
    return counts


def chat(turns: int, system: str = "") -> Conversation:
    answers = [ANSWER | {"content": f"{turn}{' word' * 40}"} for turn in range(turns // 2)]
    first = [{"role": "system", "content": system}] if system else []
    return Conversation([*first, *(message for answer in answers for message in (QUESTION, answer))])


SYSTEMS = {
    "none": [""],
    "same": ["Be kind."],
    "unique": [f"You are number {number}, a robot." for number in range(400)],
    "inspected": [f"You are <i>{number}</i>." for number in range(400)],
    "spaced": [f"You are number {number}.\n" for number in range(400)],  # this template trims it, so no layout fits
}
SYSTEMS["mixed"] = [prompt for prompts in SYSTEMS.values() for prompt in prompts]


@pytest.mark.parametrize("turns", [2, 20])
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("repeats", [1, 2, 15, 16, 100, 400])
def test_learning_layouts_takes_little_time(
    folder: Path, turns: int, system: str, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pattern of weights comes `repeats` times in a row."""
    template, _ = load(folder, FAMILIES["Llama 3"])
    random = Random(0)
    conversations = []
    for number in range(400):
        pattern = Random(number // repeats)
        conversations.append(chat(turns, random.choice(SYSTEMS[system])))
        for message in conversations[-1].messages[:-1]:
            if message["role"] == "assistant" and pattern.random() < 0.5:
                message["weight"] = 0
    counts = rendered_messages(monkeypatch)
    for start in range(0, 400, 100):
        template.batch(conversations[start : start + 100])
    with_layouts = sum(counts)
    counts.clear()
    for conversation in conversations:
        template.documents(conversation)
    assert with_layouts <= 1.04 * sum(counts)
    if repeats == 400 and system in ("none", "same", "unique"):
        assert with_layouts < 0.1 * sum(counts), "frequent shapes need no rendering"


LONG = {
    "short turns": chat(120, "Be brief."),
    "reasoning": Conversation([QUESTION, THINKING | {"reasoning_content": "so " * 900}, *chat(60).messages]),
    "a long first answer": Conversation([QUESTION, ANSWER | {"content": "word " * 3000}, *chat(40).messages]),
    "a long last question": Conversation([*chat(20).messages, QUESTION | {"content": "word " * 3000}, ANSWER]),
    "calls": Conversation([QUESTION, CALL | {"reasoning_content": "hm " * 900}, RESULT, ANSWER] * 40, [TOOL]),
    "the first answers have no weight": Conversation(
        [message | ({"weight": 0} if number < 90 else {}) for number, message in enumerate(chat(120).messages)]
    ),
}


@pytest.mark.parametrize("name", ["Qwen 3", "Mistral Nemo", "DeepSeek R1", "gpt-oss", "Qwen 3 Thinking", "SmolLM3"])
@pytest.mark.parametrize("turns", ["all", "last"])
def test_turns_beyond_the_sequence_length_do_not_matter(
    folder: Path, tmp_path: Path, name: str, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are those that rendering everything would give."""
    _, tokenizer = load(folder, FAMILIES[name])
    tokenizer.eos_token = FAMILIES[name].eos[0]
    tokenizer.save_pretrained(shutil.copytree(folder, tmp_path / "model"))
    rows = pa.Table.from_pylist([{"row": to_json(conversation), "problem": None} for conversation in LONG.values()])
    for overlong in ("truncate", "drop"):
        tokenize = DocumentTokenizer(str(tmp_path / "model"), 300, turns=turns, overlong=overlong)
        made = tokenize(rows)
        assert tokenize.template
        assert turns == "last" or tokenize.template._shorten(LONG["short turns"]) != LONG["short turns"]
        with monkeypatch.context() as patch:
            patch.setattr(ChatTemplate, "_shorten", lambda self, conversation: conversation)
            assert made.equals(tokenize(rows))


@pytest.mark.parametrize("shown", ["[:20]", "[:20 if loop.revindex > 2 else 9000]"], ids=["always", "in earlier turns"])
def test_rows_that_a_template_shortens_are_rejected(folder: Path, tmp_path: Path, shown: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content"
        + shown
        + " }}{% if message.role == 'assistant' %}<|eos|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(shutil.copytree(folder, tmp_path / "model"))
    tokenize = DocumentTokenizer(str(tmp_path / "model"), 300)
    row = to_json(Conversation([QUESTION | {"content": "word " * 3000}, ANSWER, NEXT, NEXT_ANSWER]))
    [made] = tokenize(pa.Table.from_pylist([{"row": row, "problem": None}])).to_pylist()
    assert made["problem"].startswith("the chat template drops text of a message with the role user")


def test_a_long_conversation_is_rendered_up_to_the_sequence_length(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = rendered_messages(monkeypatch)
    template, _ = load(folder, FAMILIES["Llama 3"], sequence_length=300)
    counts.clear()
    template.batch([chat(400)])
    assert sum(counts) < 3 * 400, "all turns would need 80,000"


def test_gemma_4_answers_after_a_call_with_text_and_its_result(folder: Path) -> None:
    """Gemma 4 puts the text after the result. Its prompt ends that turn, but the finished conversation continues it."""
    template, _ = load(folder, FAMILIES["Gemma 4"])
    called, answered = template.documents(CONVERSATIONS["a call with text, then its result"])[:2]
    assert called.text[slice(*called.spans[0])].endswith("probe-text<|tool_response>")
    assert "probe-text<turn|>\nprobe-answer<turn|>" in answered.text
    assert answered.text[slice(*answered.spans[0])] == "probe-answer<turn|>"


def test_reasoning_that_is_kept_follows_its_prompt(folder: Path) -> None:
    template, _ = load(folder, FAMILIES["Qwen 3.5"], past_reasoning="keep")
    [document] = template.documents(Conversation([QUESTION, ANSWER, NEXT, THINKING]))
    first, second = (document.text[slice(*span)] for span in document.spans)
    assert first.startswith("\n</think>"), "<think> and a line break are in the prompt"
    assert second.startswith("probe-reasoning\n</think>")


def test_an_answer_that_contains_a_stop_token_is_rejected(folder: Path) -> None:
    template, _ = load(folder, FAMILIES["MiniMax M2"])
    conversation = Conversation([QUESTION, ANSWER | {"content": "before [e~[ after"}])
    with pytest.raises(TemplateRejection, match=r"an answer contains \[e~\[, at which the model stops"):
        template.documents(conversation)
    [rejected] = template.batch([conversation])
    assert isinstance(rejected, TemplateRejection)


@pytest.mark.parametrize(
    ("shown", "system"),
    [
        ("message.content[:100]", "x" * 200),
        ("'strict' if 'as JSON' in message.content else message.content", "Answer as JSON, please."),
        ("message.content | replace('colour', 'color')", "Use colour."),
        ("message.content.split('/json')[0]", "Answer /json always."),
        ("message.content.replace(' [draft]', '')", "Answer. [draft]"),
        ("message.content[5:] if message.content.startswith('Note:') else message.content", "Note: be brief."),
        ("'' if message.content == 'nothing' else message.content", "nothing"),
    ],
)
def test_a_layout_is_not_used_for_a_text_that_the_template_changes(folder: Path, shown: str, system: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = (
        f"{{% for message in messages %}}<|{{{{ message.role }}}}|>{{{{ {shown} }}}}<|eos|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id])
    first = [{"role": "system", "content": prompt} for prompt in (*["Be brief."] * 20, system)]
    conversations = [Conversation([message, QUESTION, ANSWER]) for message in first]
    *made, changed = template.batch(conversations)
    assert made == [template.documents(conversation) for conversation in conversations[:-1]]
    assert str(changed).startswith("the chat template drops text of a message with the role system")


def test_earlier_reasoning_is_as_served_or_kept(folder: Path) -> None:
    first, second = load(folder, FAMILIES["Qwen 3"])[0].documents(TWO_THOUGHTS)
    assert "probe-reasoning" in first.text
    assert "probe-next" not in first.text
    assert second.text.count("probe-reasoning") == 1, "Qwen 3 drops the reasoning before the last question"
    [kept] = load(folder, FAMILIES["Qwen 3"], past_reasoning="keep")[0].documents(TWO_THOUGHTS)
    assert kept.text.count("probe-reasoning") == 2
    last, _ = load(folder, FAMILIES["Qwen 3"], past_reasoning="keep", turns="last")
    [document] = last.documents(TWO_THOUGHTS)
    assert document.text.count("probe-reasoning") == 2
    assert [document.text[slice(*span)].count("probe-reasoning") for span in document.spans] == [1]
    with pytest.raises(UserError, match="past_reasoning = keep does not work"):
        load(folder, FAMILIES["OLMo 3 Think"], past_reasoning="keep")


def test_a_document_counts_as_cut_if_the_next_turn_is_dropped(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = template_of(FAMILIES["Qwen 3"])
    tokenizer.save_pretrained(tmp_path / "model")
    row = {"messages": [QUESTION, ANSWER, NEXT | {"content": "word " * 200}, NEXT_ANSWER]}
    both = DocumentTokenizer(str(tmp_path / "model"), MAX_LENGTH).documents(row)
    assert [document.cut for document in both] == [False, False]
    [first] = DocumentTokenizer(str(tmp_path / "model"), 100).documents(row)
    assert first.cut


def test_turns_are_selected_by_weight_and_position(folder: Path) -> None:
    template, _ = load(folder, FAMILIES["Llama 3"])
    [document] = template.documents(Conversation([QUESTION, ANSWER | {"weight": 0}, NEXT, NEXT_ANSWER]))
    assert [document.text[slice(*span)] for span in document.spans] == ["probe-last<|eot_id|>"]
    assert "probe-answer" in document.text
    template, _ = load(folder, FAMILIES["Qwen 2.5"], turns="last")
    [document] = template.documents(Conversation([QUESTION, ANSWER, NEXT, CALL, RESULT, NEXT_ANSWER], [TOOL]))
    called, answered = [document.text[slice(*span)] for span in document.spans]
    assert "probe_call" in called
    assert answered == "probe-last<|im_end|>"


def trained_by_trl(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> list[int] | None:
    """Return the tokens that TRL trains, or None if TRL does not know the template."""
    try:
        marked = get_training_chat_template(tokenizer) or tokenizer.chat_template
    except ValueError:
        return None
    made = tokenizer.apply_chat_template(
        conversation.messages, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    return [token for token, mask in zip(made["input_ids"], made["assistant_masks"], strict=True) if mask]


@pytest.mark.parametrize("name", FAMILIES)
def test_trl_trains_the_same_tokens(folder: Path, name: str) -> None:
    """TRL may also train the end of the prompt, and the text after the token that ends a turn."""
    template, tokenizer = load(folder, FAMILIES[name])
    conversation = Conversation([QUESTION, ANSWER])
    theirs = trained_by_trl(tokenizer, conversation)
    if theirs is None:
        pytest.skip("TRL does not know this template")
    [document] = template.documents(conversation)
    [(start, stop)] = document.spans
    ours = tokenizer.encode(document.text[start:stop], add_special_tokens=False)
    if name in OTHER_TEXT:
        assert ours != theirs, "no longer an exception: remove it from OTHER_TEXT"
        return
    if name in OTHER_TOKENS:
        assert tokenizer.decode(theirs).strip().endswith(tokenizer.decode(ours).strip())
        assert tokenizer.encode(tokenizer.decode(theirs), add_special_tokens=False) == theirs, "one text"
        assert ours != theirs[-len(ours) :], "no longer an exception: remove it from OTHER_TOKENS"
        return
    at = next(index for index in range(len(theirs)) if theirs[index : index + len(ours)] == ours)
    before, after = tokenizer.decode(theirs[:at]), tokenizer.decode(theirs[at + len(ours) :])
    assert document.text[:start].endswith(before), "before the answer, TRL may train only the end of the prompt"
    assert after.strip() in ("", tokenizer.eos_token)


def table(folder: Path) -> str:
    """Return the table of model families for docs/data.md."""
    shown = ("tools", "tool calls", "tool results", "reasoning", "a system message")
    lines = [f"| family | TRL's mask | {' | '.join(shown)} |", "|---" * (2 + len(shown)) + "|"]
    for name, family in FAMILIES.items():
        template, tokenizer = load(folder, family)
        mask = "-" if trained_by_trl(tokenizer, Conversation([QUESTION, ANSWER])) is None else "same"
        mask = "other" if mask == "same" and name in OTHER_TEXT | OTHER_TOKENS else mask
        cells = ["rejected" if feature in template.dropped else "yes" for feature in shown]
        lines.append(f"| {name} | {mask} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_docs_show_what_each_template_supports(folder: Path) -> None:
    """To update the table, set WRITE_DOCS=1."""
    page = settings.PROJECT / "docs" / "data.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition("<!-- families -->\n")
    _, end, after = rest.partition("<!-- /families -->")
    made = f"{before}{begin}{table(folder)}\n{end}{after}"
    if os.environ.get("WRITE_DOCS"):
        page.write_text(made, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == made
