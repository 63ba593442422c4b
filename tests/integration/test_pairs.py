"""Test that preference pairs are read, cut and packed so that a pair stays together and its answers are cut alike."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import preprocess_job
import pyarrow.parquet as pq
import pytest
from preprocess_job import manifest, write_rows

from jobs import preprocess
from raymill.data import row_formats
from raymill.data.document_encoder import EncodedText
from raymill.data.examples import BadRow, Completion, Conversation, Example, Pair, Rated, from_json, to_json
from raymill.data.filters import texts
from raymill.data.options import Task
from raymill.data.packing import pack
from raymill.data.row_formats import PAIR_FORMATS, read_example
from raymill.data.tokenization import NOT_TRAINED, DocumentTokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


def conversation(*messages: dict[str, Any]) -> Conversation:
    return Conversation(list(messages))


ASKED = conversation(user("Hi?"), answer("Yes")), conversation(user("Hi?"), answer("No"))
LATER = [user("Hi?"), answer("Yes", weight=0), user("Why?")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q: ", "chosen": "a", "rejected": "b"}, (Completion("Q: ", "a"), Completion("Q: ", "b"))),
        ({"prompt": "Q: ", "chosen": "Q: a", "rejected": "Q: b"}, (Completion("Q: ", "a"), Completion("Q: ", "b"))),
        ({"prompt": "Hi", "chosen": "Hi!", "rejected": "No."}, (Completion("Hi", "Hi!"), Completion("Hi", "No."))),
        (
            {"chosen": "\n\nHuman: hi\n\nAssistant: Yes", "rejected": "\n\nHuman: hi\n\nAssistant: Yeah"},
            (Completion("\n\nHuman: hi\n\nAssistant:", " Yes"), Completion("\n\nHuman: hi\n\nAssistant:", " Yeah")),
        ),
        ({"chosen": "abc", "rejected": "abd"}, (Completion("", "abc"), Completion("", "abd"))),
        ({"prompt": [user("Hi?")], "chosen": [answer("Yes")], "rejected": [answer("No")]}, ASKED),
        ({"prompt": [user("Hi?")], "chosen": "Yes", "rejected": "No"}, ASKED),
        ({"prompt": json.dumps([user("Hi?")]), "chosen": "Yes", "rejected": "No"}, ASKED),  # as `generate` writes it
        ({"prompt": "Hi?", "chosen": [answer("Yes")], "rejected": [answer("No")]}, ASKED),
        ({"prompt": "Hi?", "chosen": [user("Hi?"), answer("Yes")], "rejected": [user("Hi?"), answer("No")]}, ASKED),
        ({"chosen": [user("Hi?"), answer("Yes")], "rejected": [user("Hi?"), answer("No")]}, ASKED),
        (
            {"chosen": json.dumps([user("Hi?"), answer("Yes")]), "rejected": json.dumps([user("Hi?"), answer("No")])},
            ASKED,
        ),
        (  # LLaMA-Factory's form
            {
                "conversations": [{"from": "human", "value": "Hi?"}],
                "chosen": {"from": "gpt", "value": "Yes"},
                "rejected": {"from": "gpt", "value": "No"},
            },
            ASKED,
        ),
        (
            {"prompt": [user("Hi?")], "chosen": [user("Hi?"), answer("Yes")], "rejected": [user("Hi?"), answer("No")]},
            ASKED,
        ),
        (
            {"prompt": "As JSON:", "chosen": '[{"a": 1}]', "rejected": '[{"a": 2}]'},
            (Completion("As JSON:", '[{"a": 1}]'), Completion("As JSON:", '[{"a": 2}]')),
        ),
        (
            {
                "chosen": [user("Hi?"), answer("Yes"), user("Why?"), answer("a")],
                "rejected": [user("Hi?"), answer("Yes"), user("Why?"), answer("b")],
                "system": "Be kind.",
            },
            tuple(conversation({"role": "system", "content": "Be kind."}, *LATER, answer(end)) for end in "ab"),
        ),
    ],
)
def test_published_pairs_are_read(row: dict[str, Any], expected: tuple[Any, Any]) -> None:
    pair = read_example(row, PAIR_FORMATS)
    assert pair == Pair(*expected)
    assert from_json(to_json(pair)) == pair
    assert from_json(to_json(texts.replace(pair, str))) == pair


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
        ({"question": "Why?", "chosen": "a", "rejected": "b"}, "pairs of texts with question"),
        ({"prompt": "Why?", "system": "Be kind.", "chosen": "a", "rejected": "b"}, "pairs of texts with system"),
        ({"prompt": "x", "chosen": " ", "rejected": "a"}, "the text is empty"),
        ({"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "\n\nHuman: a\n\nAssistant: b"}, "the text is empty"),
        (
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
                "rejected": "\n\nHuman: a\n\nAssistant: e\n\nHuman: c\n\nAssistant: d",
            },
            "differ before their last answer",
        ),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("c"), answer("d")]}, "differ before an assistant turn"),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("a")]}, "one of them ends before it"),
        ({"chosen": [answer("b")], "rejected": "a"}, "neither both texts nor both lists"),
        ({"prompt": [user("x")], "chosen": [], "rejected": [answer("a")]}, "one of them ends before it"),
        ({"prompt": "x", "chosen": [], "rejected": [answer("a")]}, "one of them ends before it"),
        ({"chosen": [], "rejected": []}, "chosen and rejected|no messages|ends before"),
        ({"prompt": "x", "completion": "a"}, "no known columns"),
    ],
)
def test_what_is_no_pair_is_a_bad_row(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRow, match=problem):
        read_example(row, PAIR_FORMATS)


def test_the_job_decides_what_a_row_is_and_not_its_columns() -> None:
    row = {
        "messages": [user("a"), answer("b")],
        "chosen": [user("a"), answer("b")],
        "rejected": [user("a"), answer("c")],
    }
    assert isinstance(read_example(row), Conversation)
    assert isinstance(read_example(row, row_formats.for_task("preference", row_formats.FORMATS)), Pair)
    with pytest.raises(BadRow, match=r"a preference pair \(chosen, rejected\), which needs --task preference"):
        read_example({"prompt": "a", "chosen": "b", "rejected": "c"})


@pytest.mark.parametrize(
    ("chosen", "rejected", "kept"),
    [
        (5, 5, (5, 5)),
        (41, 3, (41, 3)),
        (60, 3, (41, 3)),
        (60, 70, (22, 22)),
        (23, 60, (22, 22)),
        (20, 60, (20, 24)),
    ],
)
def test_answers_that_are_too_long_are_cut_alike(
    assets: Path, tmp_path: Path, chosen: int, rejected: int, kept: tuple[int, int]
) -> None:
    """No answer has more than the limit that both have, and a row has 64 tokens, of which the prompts take 20."""
    options = preprocess_job.options(assets, tmp_path, input="", sequence_length=64)
    sizes = ((0, chosen), (1, rejected))
    encoded = [EncodedText(list(range(first, first + 10 + size)), [(10, 10 + size)], False) for first, size in sizes]
    documents = DocumentTokenizer.from_options(options)._cut_all(encoded, is_pair=True)
    assert not isinstance(documents, BadRow)
    assert tuple(int((one.labels != NOT_TRAINED).sum()) for one in documents) == kept
    assert [one.cut for one in documents] == [kept[0] < chosen, kept[1] < rejected]
    drops = DocumentTokenizer.from_options(options.model_copy(update={"overlong": "drop"}))._cut_all(encoded, True)
    assert isinstance(drops, BadRow) == (kept != (chosen, rejected))


def test_a_pair_whose_prompts_fill_the_row_is_a_bad_row(assets: Path, tmp_path: Path) -> None:
    tokenizer = DocumentTokenizer.from_options(preprocess_job.options(assets, tmp_path, input="", sequence_length=64))
    for prompt in (31, 32, 64, 70):
        ids = [list(range(first, first + prompt + 9)) for first in (0, 1)]
        found = tokenizer._cut_all([EncodedText(one, [(prompt, prompt + 9)], False) for one in ids], True)
        assert isinstance(found, BadRow) == (prompt > 31)


def test_rows_that_do_not_fit_the_task_are_bad_rows(assets: Path, tmp_path: Path) -> None:
    """Formats and filters of the user may return anything. Packed in twos, unrelated rows would be compared."""
    pair = Pair(Completion("a", " b"), Completion("a", " c"))
    rated = Rated(pair.chosen, True)
    kinds: dict[Task, tuple[Example, str]] = {
        "supervised": (pair.chosen, "an answer to learn"),
        "preference": (pair, "a preference pair"),
        "unpaired_preference": (rated, "a rated answer"),
    }
    for task, (good, _) in kinds.items():
        tokenizer = DocumentTokenizer.from_options(preprocess_job.options(assets, tmp_path, input="", task=task))
        assert tokenizer.documents({"row": to_json(good), "problem": None})
        for other, (bad, kind) in kinds.items():
            if other != task:
                with pytest.raises(BadRow, match=f"^{kind}, which needs --task {other}$"):
                    tokenizer.documents({"row": to_json(bad), "problem": None})


@pytest.mark.parametrize("past_reasoning", ["served", "keep"])
def test_documents_of_pairs_end_as_transformers_renders_them(past_reasoning: str, assets: Path, tmp_path: Path) -> None:
    """A reward model reads its score at the last token. In many templates, a line break follows the stop token."""
    template = tmp_path / "lines.jinja"
    template.write_text(LINES)
    made = {"task": "preference", "chat_template": str(template), "past_reasoning": past_reasoning}
    tokenizer = DocumentTokenizer.from_options(preprocess_job.options(assets, tmp_path, input="", **made))
    messages = [user("Hi?"), answer("Yes"), user("Why?")]
    pair = {"chosen": [*messages, answer("So.")], "rejected": [*messages, answer("Who knows?")]}
    for document, messages in zip(tokenizer.documents(pair_row(pair)), pair.values(), strict=True):
        whole = tokenizer.tokenizer.apply_chat_template(messages, return_dict=False)
        assert document.input_ids.tolist() == whole
        assert tokenizer.tokenizer.decode(whole[-1:]) == "\n"
        assert document.labels[-2] in tokenizer.eos_ids
        assert document.labels[-1] == NOT_TRAINED, "only answers and their stop tokens are trained"


LINES = """
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


def pair_row(pair: dict[str, Any]) -> dict[str, Any]:
    return {"row": to_json(read_example(pair, PAIR_FORMATS)), "problem": None}


def test_answers_that_the_cut_makes_equal_are_a_bad_row(assets: Path, tmp_path: Path) -> None:
    tokenizer = DocumentTokenizer.from_options(preprocess_job.options(assets, tmp_path, input="", sequence_length=64))
    same = [list(range(90)), [*range(80), *range(10)]]
    found = tokenizer._cut_all([EncodedText(ids, [(10, 90)], False) for ids in same], True)
    assert isinstance(found, BadRow)
    assert str(found) == "chosen and rejected are equal within sequence_length"


def test_pairs_are_packed_side_by_side() -> None:
    import pyarrow as pa

    lengths = [5, 3, 4, 4, 2, 6, 7, 1]
    lists = [[number] * length for number, length in enumerate(lengths)]
    packed = pack(pa.table({"input_ids": lists, "labels": lists}), 16, -1, "preference")
    rows = np.stack([np.array(one) for one in packed["input_ids"].to_pylist()])
    positions = np.stack([np.array(one) for one in packed["position_ids"].to_pylist()])
    found = [[int(row[at]) for at in np.flatnonzero(place == 0)] for row, place in zip(rows, positions, strict=True)]
    for documents in found:
        real = [one for one in documents if one >= 0]
        assert len(real) % 2 == 0
        assert all(real[at] + 1 == real[at + 1] for at in range(0, len(real), 2))
    assert sorted(one for documents in found for one in documents if one >= 0) == list(range(8))


def test_preprocess_packs_pairs(assets: Path, tmp_path: Path, ray_session: None) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [user(f"Question {n}?")], "chosen": [answer(f"Good {n}")], "rejected": [answer("bad " * (n % 9))]}
        for n in range(60)
    ]
    options = preprocess_job.options(
        assets, tmp_path, input=str(write_rows(tmp_path / "rows.jsonl", rows)), task="preference", max_bad_share=0.5
    )
    preprocess.main(options)
    made = manifest(tmp_path)
    assert made["task"] == "preference"
    assert made["rejected_by_reason"] == {"an empty assistant turn": 7}
    assert made["train"]["documents"] + made["eval"]["documents"] == 2 * 53
    tokenizer = DocumentTokenizer.from_options(options).tokenizer
    for file in (tmp_path / "packed").glob("*/part-*.parquet"):
        if file.parent.name not in ("train", "eval"):
            continue
        for row in pq.read_table(file).to_pylist():
            starts = [at for at, place in enumerate(row["position_ids"]) if place == 0] + [len(row["input_ids"])]
            found = []
            for start, stop in pairwise(starts):
                text = tokenizer.decode(row["input_ids"][start:stop])
                trained = [token for token in row["labels"][start:stop] if token != NOT_TRAINED]
                if trained:
                    found.append((text.split("Question ")[1].split("?")[0], tokenizer.decode(trained)))
            for first, second in zip(found[::2], found[1::2], strict=True):
                assert first[0] == second[0], "a pair stays together"
                assert first[1].startswith(f"Good {first[0]}")
                assert second[1].startswith("bad ")
