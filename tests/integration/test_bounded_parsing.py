"""Test that answers are parsed as by vLLM alone, and that none makes other requests wait."""

import asyncio
import functools
import gc
import io
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import openai_harmony
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser import harmony_utils
from vllm.parser import ParserManager, harmony
from vllm.parser.engine.incremental_lexer import IncrementalLexer
from vllm.parser.engine.streaming_parser_engine import StreamingParserEngine
from vllm.parser.qwen3 import Qwen3Parser

from raymill.emulator.waiting import slowdown
from raymill.serving import bounded_parsing, parsers, vllm_arguments
from raymill.serving.deepseek_calls import BEGIN, END, SEPARATOR

Call = tuple[str, dict[str, Any]]
PROPERTIES = {"text": {"type": "string"}, "number": {"type": "integer"}, "map": {"type": "object"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("f", "get_weather")
]
HARMONY = {"openai", "openai_gptoss"}  # read tokens in code of their own: see the test of Harmony
DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"


def xml(arguments: dict[str, Any], begin: str, end: str) -> str:
    values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items())
    return "".join(begin.format(key) + value + end for key, value in values)


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(each)}" for key, each in value.items()) + "}"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def named(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def each(form: Callable[[str, dict[str, Any]], str], calls: list[Call], separator: str = "") -> str:
    return separator.join(form(*call) for call in calls)


FORMS: dict[str, Callable[[list[Call]], str]] = {
    "gemma4": lambda calls: each(lambda n, a: f"<|tool_call>call:{n}{gemma(a)}<tool_call|>", calls),
    "functiongemma": lambda calls: each(
        lambda n, a: f"<start_function_call>call:{n}{{{xml(a, '{}:<escape>', '<escape>')}}}<end_function_call>", calls
    ),
    "deepseek_v3": lambda calls: (
        DEEPSEEK[0]
        + each(lambda n, a: f"{BEGIN}function{SEPARATOR}{n}\n```json\n{json.dumps(a)}\n```{END}", calls, "\n")
        + DEEPSEEK[1]
    ),
    "deepseek_v31": lambda calls: (
        DEEPSEEK[0] + each(lambda n, a: f"{BEGIN}{n}{SEPARATOR}{json.dumps(a)}{END}", calls) + DEEPSEEK[1]
    ),
    "kimi_k2": lambda calls: (
        "<|tool_calls_section_begin|>"
        + each(
            lambda n, a: (
                f"<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
            ),
            calls,
        )
        + "<|tool_calls_section_end|>"
    ),
    "minimax_m2": lambda calls: (
        "<minimax:tool_call>\n"
        + each(
            lambda n, a: f'<invoke name="{n}">\n{xml(a, chr(60) + "parameter name={!r}>", "</parameter>")}</invoke>',
            calls,
            "\n",
        )
        + "</minimax:tool_call>"
    ),
    "seed_oss": lambda calls: each(
        lambda n, a: (
            f"<seed:tool_call>\n<function={n}>\n{xml(a, '<parameter={}>', '</parameter>')}</function></seed:tool_call>"
        ),
        calls,
    ),
    "longcat": lambda calls: each(lambda n, a: f"<longcat_tool_call>{named(n, a)}</longcat_tool_call>", calls),
    "apertus": lambda calls: f"<|tools_prefix|>{json.dumps([{n: a} for n, a in calls])}<|tools_suffix|>",
    "qwen3_coder": lambda calls: each(
        lambda n, a: (
            f"<tool_call>\n<function={n}>\n{xml(a, chr(60) + 'parameter={}>' + chr(10), chr(10) + '</parameter>')}"
            "</function>\n</tool_call>"
        ),
        calls,
    ),
    "glm45": lambda calls: each(
        lambda n, a: (
            f"<tool_call>{n}\n{xml(a, '<arg_key>{}</arg_key>' + chr(10) + '<arg_value>', '</arg_value>')}</tool_call>"
        ),
        calls,
    ),
    "olmo3": lambda calls: f"<function_calls>{each(python, calls, chr(10))}</function_calls>",
    "lfm2": lambda calls: f"<|tool_call_start|>[{each(python, calls, ', ')}]<|tool_call_end|>",
    "mistral": lambda calls: each(lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}", calls),
    "xlam": lambda calls: f"[TOOL_CALLS][{each(named, calls, ', ')}]",
    "granite": lambda calls: f"<|tool_call|>[{each(named, calls, ', ')}]",
    "granite4": lambda calls: each(lambda n, a: f"<tool_call>{named(n, a)}</tool_call>", calls, "\n"),
    "hermes": lambda calls: each(lambda n, a: f"<tool_call>{named(n, a)}</tool_call>", calls, "\n"),
    "llama4_json": lambda calls: each(lambda n, a: named(n, a, "parameters"), calls, "; "),
    "llama3_json": lambda calls: each(lambda n, a: named(n, a, "parameters"), calls, "; "),
}
"""How the models of each parser write tool calls."""
SPECIAL = re.compile(r"<[^<>\s=]+>|\[/?[A-Z_]+\]")
MARKERS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", "<|channel>", "<channel|>"]
MARKERS += ["<|python_tag|>", "<|im_start|>", "<|im_end|>", "<escape>", '<|"|>']
ATOMS = [*"()[]{}:,=\"'\\ \n", "a", "1", "f(", "call:f{", "```json\n", '"name": "f"', '"arguments": {']
ATOMS += ["<arg_key>", "<parameter=a>", "<function=f>", '<parameter name="a">', '<invoke name="f">']
WORST = {
    "glm45": "<tool_call>f\n" + "<arg_key>" * 1800,
    "qwen3_coder": "<tool_call><function=f>" + "<parameter=a><function=f>" * 640,
    "seed_oss": "<seed:tool_call><function=f>" + "<parameter=a><function=f>" * 640,
    "minimax_m2": '<minimax:tool_call><invoke name="f">' + '<parameter name="a"><invoke name="f">' * 430,
    "gemma4": "<|tool_call>call:f{" + "call:f{" * 2300,
    "olmo3": "b" * 16_000,
}
"""Answers for which vLLM alone takes 1 to 8 seconds. For DeepSeek's, see test_deepseek_calls.py."""


class Vocabulary(dict[str, int]):
    """Has every token that a parser asks for."""

    def get(self, token: str, _: Any = None) -> int:
        return self.setdefault(token, len(self))

    def __contains__(self, token: object) -> bool:
        return True

    def __missing__(self, token: str) -> int:
        return self.get(token)


class Tokenizer:
    """A tokenizer with the markers of all formats. Other words are tokens as they come."""

    def __init__(self) -> None:
        sample = "".join(form([("f", {})]) for form in FORMS.values())
        markers = dict.fromkeys([*MARKERS, *SPECIAL.findall(sample)])
        self.split = re.compile("|".join([*map(re.escape, markers), r"[A-Za-z0-9_]{1,6}", r"\s", r"[^A-Za-z0-9_\s]"]))
        self.vocabulary = Vocabulary()
        self.all_special_tokens = ["<|im_start|>", "<|im_end|>"]
        self.all_special_ids = [self.number(token) for token in self.all_special_tokens]
        self.eos_token_id = self.number("<|im_end|>")

    def number(self, token: str) -> int:
        return self.vocabulary.get(token)

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def tokens(self, text: str) -> list[str]:
        return self.split.findall(text)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.number(token) for token in self.tokens(text)]

    def decode(self, numbers: list[int], **_: Any) -> str:
        tokens = list(self.vocabulary)
        return "".join(tokens[number] for number in numbers)


TOKENIZER = Tokenizer()
PATCHED = (
    (IncrementalLexer, "feed"),
    (StreamingParserEngine, "feed"),
    (Qwen3Parser, "is_reasoning_end"),
    (harmony.HarmonyParser, "_poll_completed_message"),
    (ParserManager, "get_parser"),
)
ALONE = ParserManager.get_parser
HARMONY_POLL = harmony.HarmonyParser._poll_completed_message


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches:
        for kind, name in PATCHED:
            patches.setattr(kind, name, getattr(kind, name))
        bounded_parsing.install()
        yield


@pytest.fixture
def vllm_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that restores vLLM's own code for the rest of the test."""

    def restore() -> None:
        for kind, name in PATCHED[:2]:
            monkeypatch.setattr(kind, name, getattr(kind, name).__wrapped__)
        monkeypatch.setattr(ParserManager, "get_parser", ALONE)

    return restore


def calls(count: int, characters: int) -> list[Call]:
    sentence = 'The quick brown fox, "jumps" over\nthe {lazy} [dog] <3; '
    text = sentence * (characters // len(sentence) + 1)
    return [("f", {"text": text, "number": number, "map": {"k": "v"}}) for number in range(count)]


def request() -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], model="m", tools=TOOLS)  # type: ignore[arg-type]


def parser(tool: str = "", reasoning: str = "") -> Any:
    kind = ParserManager.get_parser(tool or None, reasoning or None, enable_auto_tools=bool(tool))
    assert kind is not None
    return kind(TOKENIZER, request().tools)  # type: ignore[arg-type]


def whole(of: Any, answer: str) -> tuple[Any, Any, list[tuple[str, str]]]:
    """Return reasoning, content and calls."""
    reasoning, content, found = of.parse(answer, request(), enable_auto_tools=True)
    return reasoning, content, [(call.name, call.arguments) for call in found or []]


def streamed(of: Any, answer: str, first: int = 1) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, content and calls of a stream of tokens. The first piece has several."""
    tokens, asked = TOKENIZER.tokens(answer), request()
    reasoning = content = ""
    found: dict[int, list[str]] = {}
    for start, end in [(0, first), *((at, at + 1) for at in range(first, len(tokens)))]:
        piece, last = tokens[start:end], end >= len(tokens)
        numbers = [TOKENIZER.number(token) for token in piece]
        message = of.parse_delta("".join(piece), numbers, asked, prompt_token_ids=[0], finished=last)
        if message is not None:
            reasoning, content = reasoning + (message.reasoning or ""), content + (message.content or "")
            for call in message.tool_calls or []:
                parts = found.setdefault(call.index, ["", ""])
                parts[0] += call.function.name or ""
                parts[1] += call.function.arguments or ""
    return reasoning, content, [(name, arguments) for name, arguments in found.values()]


def test_all_parsers_of_the_table_are_tested() -> None:
    assert set(FORMS) == {each.parser for each in parsers.TOOL_CALLS} - {"", "openai"}


@pytest.mark.parametrize("tool", FORMS)
def test_ordinary_answers_are_parsed_as_by_vllm_alone(tool: str, vllm_alone: Callable[[], None]) -> None:
    few, many = FORMS[tool](calls(3, 100)), FORMS[tool](calls(20, 500))
    ours = [whole(parser(tool), many), whole(parser(tool), "See <b>.\n" + few), streamed(parser(tool), few)]
    vllm_alone()
    theirs = [whole(parser(tool), many), whole(parser(tool), "See <b>.\n" + few), streamed(parser(tool), few)]
    assert ours == theirs
    assert len(ours[0][2]) == 20


@pytest.mark.parametrize("tool", FORMS)
def test_long_arguments_are_parsed(tool: str) -> None:
    """20 calls with 50 kB of arguments, and one with as many."""
    assert [len(whole(parser(tool), FORMS[tool](calls(*size)))[2]) for size in ((20, 2500), (1, 50_000))] == [20, 1]


def hostile(name: str, seed: int, count: int, characters: int) -> Iterator[str]:
    """Yield answers that repeat a few parts of a format, also after the beginning of a call."""
    choose = random.Random(f"{name} {seed}")
    sample = FORMS[name]([("f", {"text": "a", "number": 1})]) if name in FORMS else "<think>a"
    atoms = [*ATOMS, *MARKERS, *re.findall(r"<[^<>]*>|\[[A-Z_]+\]", sample)]
    for _ in range(count):
        start = choose.choice(["", "<think>", sample, sample[: choose.randint(0, len(sample))]])
        piece = "".join(choose.choices(atoms, k=choose.randint(1, 4)))
        yield start + piece * (characters // len(piece))


def measured(do: Callable[[], Any]) -> float:
    """Return the CPU time, without that of collecting the garbage of other tests."""
    gc.disable()
    started = time.thread_time()
    try:
        do()
    except (AssertionError, ValueError, SyntaxError, RecursionError, LookupError, TypeError):
        pass  # of vLLM: error 500, which takes no time
    finally:
        gc.enable()
    return time.thread_time() - started


def names_of_the_table() -> list[tuple[str, str]]:
    found = [(each.parser, "") for each in parsers.TOOL_CALLS] + [("", each.parser) for each in parsers.REASONING]
    return [(tool, reasoning) for tool, reasoning in found if {tool, reasoning} - HARMONY - {""}]


def all_names() -> list[tuple[str, str]]:
    """Return also the parsers that a user can name, but those that need a package that is not installed."""
    stored = vllm_arguments.stored()
    found = [(tool, "") for tool in stored.tool_parsers] + [("", reasoning) for reasoning in stored.reasoning_parsers]
    return [
        (tool, reasoning) for tool, reasoning in found if not (tool + reasoning).startswith(("cohere", "minimax_m3"))
    ]


def limit_s() -> float:
    return (bounded_parsing.MAX_S + bounded_parsing.FREE_S + 2 * bounded_parsing.CHECK_S) * _slowdown()


_slowdown = functools.cache(slowdown)


def check(tool: str, reasoning: str, answer: str) -> None:
    """Parse an answer whole, and as a stream: most of it at once, because 20 more pieces show what each one takes."""
    parse = functools.partial(whole, parser(tool, reasoning), answer)
    stream = functools.partial(streamed, parser(tool, reasoning), answer, len(TOKENIZER.tokens(answer)) - 20)
    assert measured(parse) < limit_s(), answer[:200]
    assert measured(stream) < limit_s(), answer[:200]


@pytest.mark.parametrize(("tool", "reasoning"), names_of_the_table())
def test_no_answer_takes_long(tool: str, reasoning: str) -> None:
    for answer in [*hostile(tool, 0, 3, 16_000), *([WORST[tool]] if tool in WORST else [])]:
        check(tool, reasoning, answer)


@pytest.mark.parametrize(("reasoning", "tag"), [("qwen3", "tool_call"), ("seed_oss", "seed:tool_call")])
def test_tokens_are_read_once(reasoning: str, tag: str) -> None:
    """Those of a prompt, too."""
    start, end, *others = (
        TOKENIZER.number(each) for each in (f"<{tag}>", f"</{tag}>", "<|im_start|>", "a", "</think>")
    )
    of, theirs = parser("", reasoning), Qwen3Parser.is_reasoning_end.__wrapped__  # type: ignore[attr-defined]
    assert measured(lambda: of.is_reasoning_end([start] * 30_000 + [end])) < limit_s() / 5
    choose = random.Random(0)
    for _ in range(1000):
        tokens = choose.choices([start, end, *others], k=choose.randint(0, 6))
        assert of.is_reasoning_end(tokens) == theirs(of.reasoning_parser._parser_engine, tokens), tokens


@pytest.mark.nightly
@pytest.mark.parametrize(("tool", "reasoning"), [names for names in all_names() if not HARMONY & set(names)])
def test_no_long_answer_takes_long(tool: str, reasoning: str) -> None:
    for answer in hostile(tool, 1, 10, 100_000):
        check(tool, reasoning, answer)


class Slow:
    """A parser of vLLM that takes hours for answers with `slow`."""

    tool_parser_cls = None

    def __init__(self, *_: Any) -> None:
        self.pattern = bounded_parsing.REGEX.compile(r"(a|aa)+$")

    def work(self, text: str) -> None:
        try:
            if "pattern" in text:
                self.pattern.match("a" * 60 + "b")
            while "loop" in text:
                pass
        except Exception:  # as some parsers do
            pass

    def parse(self, text: str, asked: Any, **_: Any) -> Any:
        self.work(text)
        return None, text.upper(), None

    def parse_delta(self, text: str, numbers: Any, asked: Any, **_: Any) -> Any:
        self.work(text)
        return SimpleNamespace(content=text.upper()) if text != "hold " else None


@pytest.fixture
def slow_parser() -> Any:
    kind = type("Slow", (bounded_parsing.Bounded, Slow), {"_names": 'tool_parser = "slow"'})
    return kind()


@pytest.mark.parametrize("slow", ["loop", "pattern"])
def test_a_slow_answer_is_plain_text(slow_parser: Any, slow: str, log: io.StringIO) -> None:
    assert slow_parser.parse("quick", request()) == (None, "QUICK", None)
    assert slow_parser.parse(f"a {slow}", request()) == (None, f"a {slow}", None)
    assert 'tool_parser = "slow" took too long for' in log.getvalue()


@pytest.mark.parametrize("slow", ["loop", "pattern"])
def test_a_slow_stream_goes_on_as_plain_text(slow_parser: Any, slow: str) -> None:
    asked, pieces = request(), ["quick ", "hold ", f"{slow} ", "more ", "end"]
    messages = [slow_parser.parse_delta(piece, [0], asked, finished=piece == "end") for piece in pieces]
    assert "".join(message.content for message in messages if message) == f"QUICK hold {slow} more end"


def test_other_requests_are_served(slow_parser: Any) -> None:
    """Many choices of a request together use one budget."""
    waits: list[float] = []

    async def other() -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(0.001)
            waits.append(time.monotonic() - started)

    async def serve() -> None:
        task, asked = asyncio.create_task(other()), request()
        await asyncio.sleep(0.01)
        for _ in range(20):
            slow_parser.parse("a loop", asked)
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(serve())
    assert max(waits) < 2 * limit_s()


def test_slow_pieces_are_followed_by_a_pause(slow_parser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All together arrive, in fewer messages."""

    def work(_: str) -> None:
        ends = time.thread_time() + 2 * bounded_parsing.SLOW_S
        while time.thread_time() < ends:
            pass

    monkeypatch.setattr(slow_parser, "work", work)
    asked = request()
    messages = [slow_parser.parse_delta("a", [0], asked, finished=number == 99) for number in range(100)]
    sent = [message.content for message in messages if message]
    assert "".join(sent) == "A" * 100
    assert len(sent) < 10


def test_all_patterns_of_vllm_are_bounded() -> None:
    """Each parser that vLLM has, whether a user names it or `auto` selects it."""
    for tool, reasoning in all_names():
        ParserManager.get_parser(tool or None, reasoning or None, enable_auto_tools=bool(tool))
    modules = bounded_parsing.modules()
    assert len(modules) > 80
    for _, module in modules:
        values = [*vars(module).values()]
        values += [value for kind in values if isinstance(kind, type) for value in vars(kind).values()]
        assert not [value for value in values if isinstance(value, bounded_parsing.regex.Pattern) or value is re]


def test_harmony_reads_each_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class Streamable:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.done: list[Any] = []

        @property
        def messages(self) -> list[Any]:
            read.extend(self.done)
            return self.done

    monkeypatch.setattr(openai_harmony, "StreamableParser", Streamable)
    monkeypatch.setattr(harmony_utils, "get_encoding", lambda: None)
    poll = bounded_parsing._forgetting(HARMONY_POLL)

    class Harmony(harmony.HarmonyParser):
        def __init__(self) -> None:
            self._parser: Any = Streamable()
            self._num_processed_messages = 0

    state: Any = Harmony()
    for number in range(100):
        assert poll(state) is None
        state._parser.done.append(SimpleNamespace(recipient=None, number=number))
        assert poll(state).number == number
    assert len(read) == 100
