"""Test that schemas of common SDKs work, and that what is not supported is refused in words."""

import datetime
import decimal
import json
from typing import Annotated, Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import AnyUrl, BaseModel, Field, TypeAdapter

from raymill.serving.grammar_worker import Vocabulary, compile_error, grammar_of, tokenizer_of

EOS = 256


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Event(BaseModel):
    """A model with types whose schemas have a `format`, `anyOf`, `oneOf`, `$defs` and defaults."""

    when: datetime.datetime
    price: decimal.Decimal
    site: AnyUrl | None = None
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    counts: dict[str, int] = {}


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # zod's
ACCEPTED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "pydantic": (
        TypeAdapter(Event).json_schema(),
        [
            {"when": "2026-01-02T03:04:05Z", "price": "1.5", "pet": {"kind": "cat", "lives": 9}},
            {
                "when": "2026-01-02T03:04:05Z",
                "price": 2,
                "site": None,
                "pet": {"kind": "dog", "name": "x"},
                "counts": {"a": 1},
            },
        ],
        [{"when": "now"}, {"when": "2026-01-02T03:04:05Z", "price": 2, "pet": {"kind": "cat", "lives": "x"}}],
    ),
    "zod's email": ({"type": "string", "format": "email", "pattern": EMAIL}, ["a.b@example.org"], ["a", "@", "a b@c"]),
    "zod's record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        [{}, {"a": 1.5}],
        [{"a": "b"}],
    ),
    "zod's intersection": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "number"}}, "required": ["b"]},
            ]
        },
        [{"a": "x", "b": 1}],
        [{"a": "x"}, {"a": 1, "b": 1}],
    ),
    "alternatives that overlap": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, [1, 1.5], ["a"]),
    "no other properties": (
        {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}},
        [{}, {"a": {"b": [1]}}],
        [{"c": 1}, {"a": {"c": 1}}],
    ),
    "a required property without a schema": ({"type": "object", "properties": {}, "required": ["a"]}, [{"a": 1}], [{}]),
    "properties called like keywords": (
        {
            "type": "object",
            "properties": {"properties": {"type": "object", "properties": {"format": {"type": "integer"}}}},
        },
        [{"properties": {"format": 1}}],
        [{"properties": {"additionalProperties": 1}}, {"properties": {"format": "a"}}],
    ),
    "a tuple": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2},
        [[1, "a"]],
        [[1]],
    ),
    "the client's options": (
        {"type": "object", "properties": {"a": {}}, "x-guidance": {"whitespace_pattern": "x*"}},
        [{}],
        [],
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    "uniqueItems": (TypeAdapter(set[int]).json_schema(), "uniqueItems"),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    "propertyNames": ({"type": "object", "propertyNames": {"enum": ["a"]}}, "propertyNames"),
    "look-around": ({"type": "string", "pattern": r"^(?=.*\d)[a-z\d]+$"}, "look-around"),
    "another server's schema": ({"$ref": "https://example.com/schema.json"}, "https://example.com/schema.json"),
    "unknown format": ({"type": "string", "format": "phone"}, "Unknown format: phone"),
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return tokenizer_of(Vocabulary([*(bytes([number]) for number in range(256)), b"<|eos|>"], [EOS], [EOS]))


def accepts(tokenizer: LLTokenizer, schema: Any, value: Any) -> bool:
    matcher = LLMatcher(tokenizer, grammar_of("JSON", json.dumps(schema), {}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(json.dumps(value).encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", ACCEPTED)
def test_schemas_of_sdks_work(tokenizer: LLTokenizer, name: str) -> None:
    schema, valid, invalid = ACCEPTED[name]
    assert [accepts(tokenizer, schema, value) for value in valid] == [True] * len(valid)
    assert [accepts(tokenizer, schema, value) for value in invalid] == [False] * len(invalid)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(tokenizer: LLTokenizer, name: str) -> None:
    """xgrammar ignores some of it, so answers would not match."""
    schema, words = REFUSED[name]
    assert words in (compile_error(tokenizer, grammar_of("JSON", json.dumps(schema), {})) or "")


@pytest.mark.parametrize("schema", [True, False, 5, [], "a", None], ids=str)
def test_a_schema_is_an_object(schema: Any) -> None:
    with pytest.raises(ValueError, match="must be a JSON object"):
        grammar_of("JSON", json.dumps(schema), {})
