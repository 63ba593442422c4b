"""Test the translation of structural tags: it accepts what xgrammar accepts."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import xgrammar
from llguidance import LLMatcher
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.parser import harmony  # noqa: F401  # registers its tags
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

from raymill.serving import structural_tags
from raymill.serving.grammar_worker import Vocabulary, limits, tokenizer_of
from raymill.serving.parsers import TOOL_CALLS

BYTES = [bytes([number]) for number in range(256)]
EOS = 256
SPECIAL = {"<|end|>": 257, "<|channel|>": 258, "<\uff5ctool\u2581calls\u2581begin\uff5c>": 259}
VOCABULARY = [*BYTES, b"<|eos|>", *(name.encode() for name in SPECIAL)]
TOOLS = [
    {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "text": {"type": "string"},
                "kind": {"enum": ["x", "y/z"]},
                "parts": {"type": "array", "items": {"type": "string"}},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            "required": ["a", "kind"],
            "additionalProperties": False,
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "add": [
        {"a": 1, "kind": "x"},
        {"a": -20, "text": "it's <b>\n2 > 1", "kind": "y/z", "parts": ["p", "q"], "maybe": None},
        {"a": 3, "text": "", "kind": "x", "maybe": 5},
        {"a": "one", "kind": "x"},
        {"a": 1, "kind": "z"},
        {"kind": "x"},
        {"a": 1, "kind": "x", "b": 2},
        {"a": 1, "kind": "x", "parts": [1]},
    ],
    "now": [{}, {"a": 1}],
}
MODELS = sorted(
    {
        model
        for syntax in TOOL_CALLS
        if syntax.parser and (model := ToolParserManager.get_tool_parser(syntax.parser).structural_tag_model)
    }
)


class XgrammarMatcher:
    """Matches text with xgrammar."""

    def __init__(self, tag: str) -> None:
        info = xgrammar.TokenizerInfo(VOCABULARY, xgrammar.VocabType.RAW, stop_token_ids=[EOS])
        self._compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(tag)

    def accepts(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return matcher.accept_string(text) and matcher.accept_token(EOS)


class LlguidanceMatcher:
    """Matches text with the translated grammar."""

    def __init__(self, tag: str) -> None:
        self._tokenizer = tokenizer_of(Vocabulary(VOCABULARY, [EOS, *SPECIAL.values()], [EOS]))
        text = structural_tags.to_grammar(tag, SPECIAL)
        self._matcher = LLMatcher(self._tokenizer, text, limits=limits(verbose_errors=True), log_level=0)
        assert not self._matcher.is_error(), f"{self._matcher.get_error()}\n{text}"

    def accepts(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        tokens = _tokens(text)
        return (
            matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        )


def _tokens(text: str) -> list[int]:
    found: list[int] = []
    while text:
        name = next((name for name in SPECIAL if text.startswith(name)), None)
        found += [SPECIAL[name]] if name else text[0].encode()
        text = text[len(name or text[0]) :]
    return found


def texts(tag: Any) -> Iterator[str]:
    """Yield texts of a format, some of which it does not accept, because their arguments do not fit the schema."""
    kind = tag["type"]
    if kind == "const_string":
        yield tag["value"]
    elif kind == "regex":
        yield "0"
        yield "x"
    elif kind == "any_text":
        yield "some text"
    elif kind == "json_schema":
        name = "add" if "a" in tag["json_schema"]["properties"] else "now"
        yield from (written(arguments, tag["style"]) for arguments in ARGUMENTS[name])
    elif kind == "sequence":
        yield from map("".join, sampled(*(list(texts(each)) for each in tag["elements"])))
    elif kind == "or":
        yield from itertools.chain.from_iterable(map(texts, tag["elements"]))
    elif kind == "optional":
        yield ""
        yield from texts(tag["content"])
    elif kind == "tag":
        ends = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
        yield from (tag["begin"] + inner + end for inner in texts(tag["content"]) for end in ends)
    else:
        one = [text for each in tag["tags"] for text in texts(each)]
        yield from one
        yield from map("".join, sampled(one, [tag.get("separator", " then ")], one))
        if kind == "triggered_tags":
            yield from ("", "only text", *(f"before{text}after" for text in one), *tag["triggers"], *tag["excludes"])


def sampled(*choices: list[str]) -> list[tuple[str, ...]]:
    every = list(itertools.product(*choices))
    return random.Random(0).sample(every, min(len(every), 60))


def written(arguments: dict[str, Any], style: str) -> str:
    if style == "json":
        return json.dumps(arguments)
    form = structural_tags.XML_STYLES[style]
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    return "\n".join(f"{form.begin}{name}{form.middle}{value}{form.end}" for name, value in values.items())


def tag_of(model: str, choice: Any) -> Any:
    tools = [ChatCompletionToolsParam.model_validate({"type": "function", "function": tool}) for tool in TOOLS]
    found = get_model_structural_tag(model, tools, choice, reasoning=False)
    assert found
    return found.model_dump()


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("model", MODELS)
def test_calls_of_tools_match_the_same_texts(model: str, choice: str) -> None:
    tag = tag_of(model, choice)
    theirs, ours = XgrammarMatcher(json.dumps(tag)), LlguidanceMatcher(json.dumps(tag))
    expected = {text: theirs.accepts(text) for text in texts(tag["format"])}
    assert len(set(expected.values())) == 2
    different = {text: accepted for text, accepted in expected.items() if ours.accepts(text) != accepted}
    assert not different


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "not"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
        ({"minProperties": 1}, "minProperties"),
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"required": ["absent"]}, "'absent' of a tool has no schema"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ],
    ids=str,
)
@pytest.mark.parametrize("style", structural_tags.XML_STYLES)
def test_no_keyword_of_a_parameter_is_ignored(style: str, change: dict[str, Any], words: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}} | change
    content = {"type": "json_schema", "json_schema": schema, "style": style}
    tag = {"format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    with pytest.raises(ValueError, match=words):
        structural_tags.to_grammar(json.dumps(tag), SPECIAL)
