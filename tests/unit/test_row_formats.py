"""Test that rows in the formats of published data sets are read."""

import contextlib
import json
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymill.data import row_sources
from raymill.data.examples import BadRow, Completion, Conversation, decode, from_json, to_json
from raymill.data.messages import ROLES
from raymill.data.row_formats import FORMATS, columns_of, format_of, read_example
from raymill.errors import UserError

USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
PAIR = [USER, ASSISTANT]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "description": None, "parameters": {"type": "object"}}}
CALL = {"id": "c1", "function": {"arguments": {"a": 2}, "name": "add"}, "type": "function"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "c1"}


def openai_call(arguments: str = '{"a": 2}') -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("messages", {"messages": PAIR}, Conversation(PAIR)),
        ("messages as JSON", {"messages": json.dumps(PAIR)}, Conversation(PAIR)),
        (
            "OpenAI: parts, weight, null content",
            {
                "messages": [
                    {"role": "user", "content": parts("2+2?")},
                    {"role": "assistant", "content": None, "tool_calls": [openai_call()]},
                    RESULT | {"content": parts("4")},
                    {"role": "assistant", "content": parts("4"), "weight": 0},
                    {"role": "assistant", "content": parts("4")},
                ],
                "tools": [{"type": "function", "function": {"parameters": {"type": "object"}, "name": "add"}}],
            },
            Conversation([USER, CALLING, RESULT, ASSISTANT | {"weight": 0}, ASSISTANT], [TOOL]),
        ),
        (
            "several parts",
            {
                "messages": [
                    USER | {"content": [*parts("2+"), *parts(""), *parts("2?")], "text_parts": "hi"},
                    ASSISTANT | {"content": parts("4")},
                ]
            },
            Conversation([{"role": "user", "content": "2+\n2?", "text_parts": ["2+", "", "2?"]}, ASSISTANT]),
        ),
        (
            "tools as JSON, without a wrapper",
            {"messages": PAIR, "tools": json.dumps([TOOL["function"]])},
            Conversation(PAIR, [TOOL]),
        ),
        ("a system prompt in a column", {"messages": PAIR, "system": "Be brief."}, Conversation([SYSTEM, *PAIR])),
        (
            "ShareGPT",
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": "4"},
                ]
            },
            Conversation([SYSTEM, *PAIR]),
        ),
        ("ShareGPT with roles", {"conversations": PAIR}, Conversation(PAIR)),
        (
            "ShareGPT with calls",
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                    {"from": "observation", "value": "4"},
                    {"from": "gpt", "value": "4"},
                ],
            },
            Conversation(
                [
                    USER,
                    CALLING | {"tool_calls": [{"function": CALL["function"], "type": "function"}]},
                    {"role": "tool", "content": "4"},
                    ASSISTANT,
                ]
            ),
        ),
        (
            "Alpaca",
            {"instruction": "Add.", "input": "2+2", "output": "4"},
            Conversation([{"role": "user", "content": "Add.\n\n2+2"}, ASSISTANT]),
        ),
        ("Alpaca without input", {"instruction": "2+2?", "input": "", "output": "4"}, Conversation(PAIR)),
        (
            "Dolly",
            {"instruction": "Add.", "context": "2+2", "response": "4", "category": "maths"},
            Conversation([{"role": "user", "content": "Add.\n\n2+2"}, ASSISTANT]),
        ),
        (
            "with a history",
            {"instruction": "2+2?", "output": "4", "history": [["1+1?", "2"]], "system": "Be brief."},
            Conversation([SYSTEM, {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, *PAIR]),
        ),
        (
            "with a history of messages",
            {
                "instruction": "2+2?",
                "output": "4",
                "history": [USER | {"content": "1+1?"}, ASSISTANT | {"content": "2"}],
            },
            Conversation([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, *PAIR]),
        ),
        ("an empty instruction", {"instruction": "", "input": "2+2?", "output": "4"}, Conversation(PAIR)),
        ("an instruction of white space", {"instruction": " \n", "input": "2+2?", "output": "4"}, Conversation(PAIR)),
        ("an input of white space", {"instruction": "2+2?", "input": " ", "output": "4"}, Conversation(PAIR)),
        (
            "an empty question before another",
            {"instruction": "", "question": "2+2?", "answer": "4"},
            Conversation(PAIR),
        ),
        (
            "tools and history that are null",
            {"query": "2+2?", "answer": "4", "tools": "null", "history": "null"},
            Conversation(PAIR),
        ),
        (
            "weights as text",
            {"messages": [USER, ASSISTANT | {"weight": "0"}, USER, ASSISTANT | {"weight": "1"}]},
            Conversation([USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT | {"weight": 1}]),
        ),
        (
            "weights as numbers with a decimal point",
            {"messages": [USER, ASSISTANT | {"weight": 0.0}, USER, ASSISTANT | {"weight": 1.0}]},
            Conversation([USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT | {"weight": 1}]),
        ),
        (
            "weights as booleans in ShareGPT",
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": "4", "weight": False},
                    {"from": "gpt", "value": "4", "weight": True},
                ]
            },
            Conversation([USER, ASSISTANT | {"weight": 0}, ASSISTANT | {"weight": 1}]),
        ),
        (
            "ShareGPT with calls in OpenAI's format",
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": "I add.", "tool_calls": [openai_call()]},
                    {"from": "tool", "value": "4", "tool_call_id": "c1"},
                    {"from": "gpt", "value": "4"},
                ]
            },
            Conversation([USER, CALLING | {"content": "I add."}, RESULT, ASSISTANT]),
        ),
        ("question and answer", {"question": "2+2?", "answer": "4"}, Conversation(PAIR)),
        ("prompt and response", {"prompt": "2+2?", "response": "4"}, Conversation(PAIR)),
        ("prompt and completion", {"prompt": "2+2=", "completion": "4"}, Completion("2+2=", "4")),
        ("conversational completion", {"prompt": [USER], "completion": [ASSISTANT]}, Conversation(PAIR)),
        ("text", {"text": "2+2=4"}, Completion("", "2+2=4")),
        (
            "reasoning",
            {"messages": [USER, ASSISTANT | {"reasoning": "Twice two."}]},
            Conversation([USER, ASSISTANT | {"reasoning_content": "Twice two."}]),
        ),
    ],
)
def test_each_format_is_read(tmp_path: Path, name: str, row: dict[str, Any], expected: object) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    head = row_sources.head(row_sources.find(str(tmp_path)), 10)
    assert [from_json(found["row"]) for found in head.rows] == [expected] * 2, name
    assert len({found["row"] for found in head.rows}) == 1, "parquet and JSONL give the same bytes"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "a", "rejected": "b"}, "a preference pair"),
        ({"prompt": "a", "completion": "b", "label": True}, "a rated answer"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "image_url"}]}]}, "parts that are not text"),
        ({"messages": PAIR, "functions": [{"name": "add"}]}, "functions is deprecated"),
        ({"messages": [USER, {"role": "assistant", "function_call": {"name": "add"}}]}, "function_call is deprecated"),
        ({"messages": [SYSTEM, *PAIR], "system": "Be kind."}, "two system prompts"),
        ({"messages": [USER, ASSISTANT | {"weight": 0}]}, "every assistant turn has weight 0"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [openai_call("{")]}]}, "the arguments of a tool call"),
        ({"messages": PAIR, "tools": "add"}, "tools is text but not valid JSON"),
        ({"conversations": [{"from": "alien", "value": "hm"}]}, "a turn with an unknown `from`"),
        ({"text": " "}, "nothing to train"),
        *(
            ({"messages": [USER, ASSISTANT, USER, ASSISTANT | {"weight": weight}]}, "a weight that is neither 0 nor 1")
            for weight in (0.5, "0.5", 2, -1, "no", [0], float("nan"))
        ),
        *(
            ({"instruction": "a", "output": "b", "history": history}, "history is neither a list of pairs nor")
            for history in (
                ["hi"],
                [["a", "b"], "cd"],
                [{"user": "a", "assistant": "b"}],
                {"ab": 1},
                [["a", "b", "c"]],
                "1",
                [["a", "b"], {"role": "user", "content": "c"}],
            )
        ),
        ({"instruction": "a", "output": "b", "history": [[None, "b"]]}, "content that is not text"),
        ({"instruction": "a", "output": "b", "history": [{"role": "user", "content": 1}]}, "content that is not text"),
        ({"instruction": "a", "input": 0, "output": "b"}, "a value that is not text"),
        ({"messages": PAIR, "system": "a", "system_prompt": "b"}, "two system prompts: system and system_prompt"),
        ({"messages": [USER, ASSISTANT | {"reasoning": "a", "thinking": "b"}]}, "two different reasonings"),
        ({"messages": {"role": ["user"], "content": ["a"]}}, "messages is an object of lists, not a list of objects"),
        ({"messages": {"role": "user"}}, "messages is an object, not a list of objects"),
        ({"messages": "null"}, "messages is null, not a list of objects"),
        ({"messages": ["hi", "yo"]}, "messages is a list with text, not a list of objects"),
        ({"conversations": [["hi", "yo"]]}, "conversations is a list with a list, not a list of objects"),
        ({"messages": PAIR, "tools": "3"}, "tools is a number, not a list of objects"),
    ],
)
def test_unsupported_rows_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        read_example(row)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "text", "[1]", "{", "\ud83d"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["function", "name", "type"]), inner),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(ROLES) | json_values,
            "from": st.sampled_from(["human", "gpt", "function_call"]) | json_values,
            **dict.fromkeys(("content", "value", "tool_calls", "reasoning", "weight"), json_values),
        },
    )
    | json_values,
    max_size=3,
)


@hypothesis.settings(max_examples=3000, derandomize=True, database=None, deadline=None)
@given(
    st.dictionaries(st.sampled_from(columns_of(FORMATS)), messages | json_values, min_size=1, max_size=4)
    | st.fixed_dictionaries({"messages": messages})
    | st.fixed_dictionaries({"conversations": messages})
)
def test_any_row_is_read_or_raises_bad_row(row: dict[str, Any]) -> None:
    with contextlib.suppress(BadRow):
        to_json(read_example(row))


def test_messages_take_precedence_over_preference_pairs() -> None:
    row = {"messages": PAIR, "chosen": PAIR, "rejected": PAIR}
    assert read_example(row) == Conversation(PAIR)
    assert format_of(row).name == "conversations"


def test_parquet_nulls_are_removed_from_arguments_and_schemas(tmp_path: Path) -> None:
    calls = [{"function": {"name": name, "arguments": {key: "2"}}} for name, key in (("add", "a"), ("double", "b"))]
    table = pa.Table.from_pylist([{"messages": [USER, {"role": "assistant", "tool_calls": calls}]}])
    pq.write_table(table, tmp_path / "rows.parquet")
    [found] = row_sources.head(row_sources.find(str(tmp_path)), 10).rows
    made = from_json(found["row"])
    assert isinstance(made, Conversation)
    assert [call["function"]["arguments"] for call in made.messages[1]["tool_calls"]] == [{"a": "2"}, {"b": "2"}]


def test_a_row_gives_the_same_bytes_from_jsonl_and_parquet(tmp_path: Path) -> None:
    """`datasets.to_json` writes a null for each argument that only other rows have."""
    first = {"city": "Rome", "zone": None, "where": {"lat": 1, "lon": None}, "tags": [None, {"a": None, "b": "c"}]}
    second = {"city": None, "zone": "UTC", "where": {"lat": None, "lon": 2}, "tags": []}
    rows = [
        {
            "messages": [
                USER | {"name": None},
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": one}}]},
            ],
            "tools": [{"function": {"name": "f", "parameters": {"properties": {"city": None, "zone": {"type": "x"}}}}}],
        }
        for one in (first, second)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    found = [row["row"] for row in row_sources.head(row_sources.find(str(tmp_path)), 10).rows]
    assert found[:2] == found[2:]
    assert b'"arguments":{"city":"Rome","where":{"lat":1},"tags":[null,{"b":"c"}]}' in found[0]


def test_maps_are_read_as_objects(tmp_path: Path) -> None:
    table = pa.table({"messages": pa.array([PAIR], pa.list_(pa.map_(pa.string(), pa.string())))})
    pq.write_table(table, tmp_path / "rows.parquet")
    [found] = row_sources.head(row_sources.find(str(tmp_path)), 10).rows
    assert from_json(found["row"]) == Conversation(PAIR)


@pytest.mark.parametrize("text", ['[{"messages": []}, {"messages": []}]', '[\n  {\n    "messages": []\n  }\n]', "[]"])
def test_a_json_array_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"can be used: a JSON array instead of one object per line; rename the file"):
        row_sources.head(row_sources.find(str(tmp_path)), 10)


FAR = 2**60
UNREADABLE = {
    "a year beyond 9999": pa.array([400_000_000_000], pa.timestamp("s")),
    "a date beyond 9999": pa.array([2**31 - 1], pa.date32()),
    "a duration": pa.array([FAR], pa.duration("s")),
    "nested": pa.array([[{"at": FAR}]], pa.list_(pa.struct({"at": pa.timestamp("ms")}))),
    "an unknown time zone": pa.array([0], pa.timestamp("s", "Mars/Base")),
    "text that is not UTF-8": pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers()),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unused_value_that_python_cannot_hold_does_not_matter(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"text": ["2+2=4"], "unused": UNREADABLE[name]}), tmp_path / "rows.parquet")
    head = row_sources.head(row_sources.find(str(tmp_path)), 10)
    assert [from_json(row["row"]) for row in head.rows] == [Completion("", "2+2=4")]
    assert head.unused == ("unused",)


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("column", ["text", "system"])
def test_a_used_value_that_python_cannot_hold_rejects_the_row(tmp_path: Path, name: str, column: str) -> None:
    columns = {"text": {"text": UNREADABLE[name]}, "system": {"messages": [PAIR], "system": UNREADABLE[name]}}[column]
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    [row] = row_sources.head(row_sources.find(str(tmp_path)), 10).rows
    assert row["problem"] == "a value that is not text"


def test_arguments_and_schemas_keep_the_order_of_their_keys() -> None:
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [openai_call('{"z": 1, "a": 2}')]}]}
    assert b'{"z":1,"a":2}' in to_json(read_example(row))


def test_unused_columns_are_listed(tmp_path: Path) -> None:
    row = {"instruction": "2+2?", "output": "4", "category": "maths", "id": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    pq.write_table(pa.Table.from_pylist([row | {"source": "book"}]), tmp_path / "rows.parquet")
    head = row_sources.head(row_sources.find(str(tmp_path)), 10)
    assert (head.formats, head.unused) == (("instructions and answers",), ("category", "id", "source"))


def test_a_question_that_is_not_read_is_listed(tmp_path: Path) -> None:
    row = {"instruction": "2+2?", "output": "4", "prompt": "Below is an instruction: 2+2?", "context": "maths"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    head = row_sources.head(row_sources.find(str(tmp_path)), 10)
    assert head.unused == ("prompt",)


def test_a_file_of_preference_pairs_gives_a_one_sentence_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"no row of .* can be used: a preference pair .*; or pass another --input"):
        row_sources.head(row_sources.find(str(tmp_path)), 10)


ODD_JSON = [
    b"NaN",
    b"-Infinity",
    b"1e400",
    b"12345678901234567890123",
    b"9007199254740993.0",
    b"-0.0",
    b'"\\ud800"',
    b'"\xed\xa0\x80"',
    b'"\xff"',
    b'"\x01"',
    b'\xef\xbb\xbf{"a": 1}',
    b'{"a": 1, "a": 2}',
    b"[1,]",
    b"01",
    b"{} {}",
    b"",
    b"[" * 100_000,
]


@pytest.mark.parametrize("text", [*ODD_JSON, b'"abc"', b"1E5"], ids=lambda text: repr(text[:20]))
def test_json_is_read_as_python_reads_it(text: bytes) -> None:
    assert repr(_read_or_refuse(decode, text)) == repr(_read_or_refuse(json.loads, text))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner)))
def test_any_json_is_read_as_python_reads_it(value: Any) -> None:
    text = json.dumps(value).encode()
    assert repr(decode(text)) == repr(json.loads(text))


def _read_or_refuse(read: Any, text: bytes) -> Any:
    try:
        return read(text)
    except (ValueError, RecursionError) as error:
        return "refused" if isinstance(error, ValueError) else "too deep"
