"""Test that DeepSeek's tool calls are found as by vLLM's own patterns, in linear time."""

import random
import time
from typing import Any

import pytest
from vllm.tool_parsers.deepseekv3_tool_parser import DeepSeekV3ToolParser
from vllm.tool_parsers.deepseekv31_tool_parser import DeepSeekV31ToolParser

from raymill.emulator.waiting import slowdown
from raymill.serving import deepseek_calls
from raymill.serving.deepseek_calls import BEGIN, END, SEPARATOR

START, STOP = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"


class Tokenizer:
    """A tokenizer that has DeepSeek's markers."""

    def get_vocab(self) -> dict[str, int]:
        return {marker: number for number, marker in enumerate((START, STOP, BEGIN, END, SEPARATOR))}


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> dict[Any, tuple[Any, Any]]:
    """Return for each kind of parser one with vLLM's patterns and one with ours."""
    kinds = (DeepSeekV3ToolParser, DeepSeekV31ToolParser)
    originals = {kind: kind(Tokenizer()) for kind in kinds}  # type: ignore[arg-type]
    for kind in kinds:
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    deepseek_calls.install()
    return {kind: (originals[kind], kind(Tokenizer())) for kind in kinds}  # type: ignore[arg-type]


def call(kind: Any, name: str, arguments: str) -> str:
    if kind is DeepSeekV3ToolParser:
        return f"{BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{END}"
    return f"{BEGIN}{name}{SEPARATOR}{arguments}{END}"


@pytest.mark.parametrize("kind", [DeepSeekV3ToolParser, DeepSeekV31ToolParser])
def test_the_calls_equal_those_of_vllm(parsers: dict[Any, tuple[Any, Any]], kind: Any) -> None:
    theirs, ours = parsers[kind]
    choose = random.Random(0)
    for _ in range(50):
        calls = [call(kind, f"f{n}", choose.choice(['{"a": "<b>`"}', "{}", '{"x": [1, 2]}'])) for n in range(3)]
        answer = f"Let me see.{START}{chr(10).join(calls[: choose.randint(1, 3)])}{STOP}"
        found, expected = (
            [(each.type, each.function) for each in parser.extract_tool_calls(answer, None).tool_calls]
            for parser in (ours, theirs)
        )
        assert found == expected != []
        part = calls[0].removeprefix(BEGIN).removesuffix(END).removesuffix("\n```")
        for name in ("stream_tool_call_portion_regex", "stream_tool_call_name_regex"):
            match, other = (getattr(parser, name).match(part) for parser in (ours, theirs))
            assert match.groupdict() == other.groupdict()


@pytest.mark.parametrize("kind", [DeepSeekV3ToolParser, DeepSeekV31ToolParser])
@pytest.mark.parametrize(
    "piece",
    [
        BEGIN,
        SEPARATOR,
        BEGIN + SEPARATOR,
        BEGIN + "f" + SEPARATOR + "g",
        BEGIN + SEPARATOR + "\n```json\n",
        BEGIN + SEPARATOR + "\n```json\n{}",
        "\n```json\n",
        "<",
        "a",
    ],
)
def test_repeated_markers_take_linear_time(parsers: dict[Any, tuple[Any, Any]], kind: Any, piece: str) -> None:
    _, ours = parsers[kind]
    answer = START + piece * (200_000 // len(piece))
    started = time.thread_time()
    ours.extract_tool_calls(answer, None)
    for name in ("stream_tool_call_portion_regex", "stream_tool_call_name_regex"):
        getattr(ours, name).match(answer)
    assert time.thread_time() - started < 0.5 * slowdown()
