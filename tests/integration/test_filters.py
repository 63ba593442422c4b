"""Test which rows filters drop or change, that the result depends on nothing else, and that each row has its reason."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import preprocess_job
import pyarrow.parquet as pq
import pytest
import ray.cloudpickle
from preprocess_job import manifest, write_rows
from ray.data import DataContext, ExecutionResources

from jobs import preprocess
from raymill import environment, optional, settings
from raymill.data import row_sources
from raymill.data.examples import Completion, Conversation, Example, to_json
from raymill.data.filters import contamination, language, names, near_duplicates, pii, rules, texts, word_runs
from raymill.data.filters.contamination import Questions
from raymill.data.filters.gate import (
    CONTAMINATED,
    EQUAL,
    FEW_WORDS,
    NEAR_DUPLICATE,
    Drop,
    Gate,
    RowComparer,
    content_hashes,
)
from raymill.data.filters.options import FilterOptions
from raymill.data.options import PreprocessOptions
from raymill.data.shuffle import is_held_out
from raymill.errors import UserError

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it, as with a job's script
VOCABULARY = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "on", "um", "esk")]


def sentence(rng: random.Random, words: int) -> list[str]:
    return rng.choices(VOCABULARY, k=words)


def row(question: str, answer: str, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]} | columns


def options(assets: Path, folder: Path, source: Path | str, **changes: Any) -> PreprocessOptions:
    return preprocess_job.options(assets, folder, input=str(source), **{"eval_share": 0.2} | changes)


def dropped(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "packed" / "dropped").glob("*.parquet"))
    return [one for file in files for one in pq.read_table(file).to_pylist()]


# ---------------------------------------------------------------- words


def test_words_are_hashed_alike_wherever_they_stand() -> None:
    found = word_runs.words(
        ["Hello, World! \u00c9t\u00e9 \u4e2d\u6587\u3002", "", "x", "hello \u201cworld\u201d", "\u00e9t\u00e9 \u6587"]
    )
    counts = np.diff(found.starts).tolist()
    assert counts == [6, 0, 1, 2, 2]  # the full stop of Chinese is a character, too
    first = found.hashes[:6]
    assert found.hashes[7:9].tolist() == first[:2].tolist()
    assert found.hashes[9:].tolist() == [first[2], first[4]]
    assert len(set(first.tolist())) == 6


def test_long_texts_and_words_do_not_change_the_hashes() -> None:
    texts_ = [" ".join(sentence(random.Random(number), 3000)) + " " + "x" * 1000 for number in range(40)]
    together = word_runs.words(texts_)
    for number, text in enumerate(texts_):
        alone = word_runs.words([text]).hashes
        assert together.hashes[together.starts[number] : together.starts[number + 1]].tolist() == alone.tolist()


def test_runs_are_those_of_a_plain_loop() -> None:
    found = word_runs.words(["a b c d e", "a b", "", "b c d", "c d e"])
    runs = word_runs.runs(found, 3)
    assert np.diff(runs.starts).tolist() == [3, 1, 0, 1, 1]
    assert runs.hashes[4] == runs.hashes[1]
    assert runs.hashes[5] == runs.hashes[2]
    assert len(set(runs.hashes.tolist())) == 4


def test_signatures_are_those_of_rensa_in_this_version() -> None:
    """Another version of rensa, or of the hashes of words, would drop other rows of the same input."""
    found = near_duplicates.signatures(word_runs.words(["a b c d e f g", ""]), 5)
    assert found.shape == (2, near_duplicates.SLOTS)
    assert found[0, :4].tolist() == GOLDEN


GOLDEN = [3325957622, 3247705274, 3298378355, 2341368866]


# ---------------------------------------------------------------- near-duplicates


def similarity(one: str, other: str, size: int = 5) -> float:
    """Return the Jaccard similarity of the runs of words of two texts."""
    runs = [set(zip(*(text.split()[at:] for at in range(size)), strict=False)) for text in (one, other)]
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


def edited(words: list[str], changes: int, rng: random.Random) -> list[str]:
    changed = list(words)
    for at in rng.sample(range(len(words)), changes):
        changed[at] = "changed" + str(rng.random())[2:6]
    return changed


def decide(answers: list[str], threshold: float, order: list[int] | None = None) -> dict[str, str]:
    """Return which answer is kept instead of each that is dropped."""
    order = order or list(range(len(answers)))
    shown = [answers[at] for at in order]
    hashes = content_hashes([text.encode() for text in shown])
    found = near_duplicates.decide(
        hashes, np.zeros(len(shown), np.int16), near_duplicates.signatures(word_runs.words(shown), 5), threshold
    )
    text_of = {one.tobytes(): text for one, text in zip(hashes, shown, strict=True)}
    return {
        text_of[gone.tobytes()]: text_of[kept.tobytes()] for gone, kept in zip(found.dropped, found.kept, strict=True)
    }


def test_near_duplicates_are_found_and_only_those() -> None:
    rng = random.Random(0)
    originals = [sentence(rng, 150) for _ in range(300)]
    close = [edited(words, 2, rng) for words in originals[:100]]  # about 0.87 similar
    distant = [edited(words, 20, rng) for words in originals[100:200]]  # about 0.3 similar
    answers = [" ".join(words) for words in (*originals, *close, *distant)]
    found = decide(answers, 0.75)
    pairs = {frozenset((" ".join(one), " ".join(other))) for one, other in zip(originals, close, strict=False)}
    assert {frozenset(pair) for pair in found.items()} <= pairs
    assert len(found) >= 99
    assert all(similarity(gone, kept) > 0.7 for gone, kept in found.items())
    for seed in range(5):
        order = list(range(len(answers)))
        random.Random(seed).shuffle(order)
        assert decide(answers, 0.75, order) == found


def test_a_chain_drops_only_what_is_similar_to_a_kept_row() -> None:
    rng = random.Random(1)
    chain = [sentence(rng, 200)]
    for _ in range(12):
        chain.append(edited(chain[-1], 2, rng))
    answers = [" ".join(words) for words in chain]
    assert similarity(answers[0], answers[-1]) < 0.5
    found = decide(answers, 0.8)
    assert 0 < len(found) < 12
    assert not found.keys() & set(found.values())
    assert all(similarity(gone, kept) > 0.7 for gone, kept in found.items())


def test_many_rows_of_one_form_take_no_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair is about 0.7 similar, so the bands propose many of them."""
    rng = random.Random(6)
    form = sentence(rng, 100)
    answers = [" ".join([*form, *sentence(rng, 20)]) for _ in range(600)]
    monkeypatch.setattr(near_duplicates, "MAX_CANDIDATES", 20)
    hashes = content_hashes([text.encode() for text in answers])
    signed = near_duplicates.signatures(word_runs.words(answers), 5)
    found = near_duplicates.decide(hashes, np.zeros(600, np.int16), signed, 0.8)
    assert found.crowded > 300
    assert len(found.dropped) < 10


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_bands_propose_almost_all_pairs_at_the_threshold(threshold: float) -> None:
    count, slots = near_duplicates.bands(threshold)
    assert 1 - (1 - threshold**slots) ** count >= near_duplicates.SURE
    assert count * slots <= near_duplicates.SLOTS


def test_more_rows_than_fit_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "MAX_BYTES", 100 * near_duplicates.ROW_BYTES)
    near_duplicates.check_memory(100)
    with pytest.raises(UserError, match=r"compares at most 100 rows, because each takes [\d,]+ bytes"):
        near_duplicates.check_memory(101)
    with pytest.raises(UserError, match=r"holds at most [\d,]+ runs of words"):
        near_duplicates.check_memory(1, 10**6)


# ---------------------------------------------------------------- the job


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Return a file of rows, and its rows by what is wrong with them."""
    rng = random.Random(2)
    unique = [row(" ".join(sentence(rng, 20)), " ".join(sentence(rng, 60))) for _ in range(300)]
    near = []
    for one in unique[:40]:
        question, answer = (message["content"] for message in one["messages"])
        near.append(row(question, " ".join(edited(answer.split(), 1, rng))))
    questions = [" ".join(sentence(rng, 25)) for _ in range(20)]
    known = [row(f"Please answer. {question.upper()}!", "yes of course") for question in questions]
    personal = [row(f"Who is it? {n}", f"Write to anna.{n}@example.org or call +49 30 1234 {n:04}.") for n in range(10)]
    short = [row("Why?", f"so {n}") for n in range(5)]
    found = {"unique": unique, "near": near, "known": known, "personal": personal, "short": short}
    folder = tmp_path_factory.mktemp("planted")
    everything = [one for rows in found.values() for one in rows]
    rng.shuffle(everything)
    write_rows(folder / "questions.jsonl", [{"task": "t", "question": question} for question in questions])
    return write_rows(folder / "rows.jsonl", everything), found


FILTERS = {"near_duplicates": 0.7, "min_words": 5, "pii": "replace", "decontaminate_held_out": True}


@pytest.fixture(scope="module")
def filtered(
    tmp_path_factory: pytest.TempPathFactory, assets: Path, planted: tuple[Path, Any], ray_session: None
) -> Path:
    folder = tmp_path_factory.mktemp("filtered")
    questions = str(planted[0].parent / "questions.jsonl")
    preprocess.main(options(assets, folder, planted[0], filters=FILTERS | {"decontaminate": (questions,)}))
    return folder


def test_planted_rows_are_dropped_with_their_reasons(filtered: Path, planted: tuple[Path, Any]) -> None:
    file, found = planted
    made = manifest(filtered)
    counts = made["dropped_by_reason"][str(file)]
    assert counts[FEW_WORDS] == len(found["short"])
    assert len(found["near"]) - 2 <= counts[NEAR_DUPLICATE] <= len(found["near"])
    assert 10 <= counts[CONTAMINATED] <= len(found["known"])  # those that are not held out
    assert made["rows_changed"] == len(found["personal"])
    assert made["rows_rejected"] == 0
    listed = dropped(filtered)
    assert Counter(one["reason"] for one in listed) == counts
    assert made["rows_dropped"] == len(listed) == sum(counts.values())
    assert all((one["kept"] is not None) == (one["reason"] == NEAR_DUPLICATE) for one in listed)
    assert all(one["source"] == str(file) for one in listed)
    keys = {one["key"] for one in listed}
    assert all(len(one["kept"]) == 32 and one["kept"] not in keys for one in listed if one["kept"])
    documents = made["train"]["documents"] + made["eval"]["documents"]
    assert documents == sum(map(len, found.values())) - len(listed)


def test_personal_data_is_in_no_file(filtered: Path) -> None:
    for file in (filtered / "packed").rglob("*"):
        if file.is_file():
            assert b"example.org" not in file.read_bytes()
    assert not any("example.org" in json.dumps(one) for one in dropped(filtered))


def test_another_order_and_other_files_drop_the_same_rows(
    filtered: Path, planted: tuple[Path, Any], assets: Path, tmp_path: Path
) -> None:
    lines = planted[0].read_text().splitlines()
    random.Random(3).shuffle(lines)
    (tmp_path / "raw").mkdir()
    for number in range(3):
        (tmp_path / "raw" / f"{number}.jsonl").write_text("\n".join(lines[number::3]) + "\n")
    questions = str(planted[0].parent / "questions.jsonl")
    changed = options(assets, tmp_path, tmp_path / "raw", filters=FILTERS | {"decontaminate": (questions,)}, seed=9)
    preprocess.main(changed)
    ours, theirs = ({one["row"]: one["reason"] for one in dropped(folder)} for folder in (filtered, tmp_path))
    assert ours == theirs
    assert manifest(tmp_path)["content_hash"] != manifest(filtered)["content_hash"], "because of the seed"


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_bytes(
    workers: int,
    filtered: Path,
    planted: tuple[Path, Any],
    assets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of a few rows change which task sees which rows first."""
    questions = str(planted[0].parent / "questions.jsonl")
    monkeypatch.setattr(row_sources, "PIECE_BYTES", 20_000)
    changed = options(assets, tmp_path, planted[0], filters=FILTERS | {"decontaminate": (questions,)})
    context = DataContext.get_current().copy()
    context.execution_options.resource_limits = ExecutionResources(cpu=workers)
    with DataContext.current(context):
        preprocess.main(changed)
    files = [
        {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.parquet"))}
        for folder in (filtered / "packed", tmp_path / "packed")
    ]
    assert files[0].keys() >= {"train/part-00000.parquet", "dropped/part-00000.parquet"}
    assert files[0] == files[1]


def test_equal_rows_belong_to_the_input_named_first(assets: Path, tmp_path: Path, ray_session: None) -> None:
    rng = random.Random(4)
    both = [row("Which?", " ".join(sentence(rng, 40))) for _ in range(20)]
    only = [row("What?", " ".join(sentence(rng, 40))) for _ in range(10)]
    first = write_rows(tmp_path / "first.jsonl", both)
    second = write_rows(tmp_path / "second.jsonl", [*both, *only, *both])
    preprocess.main(
        options(assets, tmp_path, first, mix=(f"{second}=2",), filters={"near_duplicates": 1.0}, eval_share=0)
    )
    made = manifest(tmp_path)
    assert made["sources"][str(first)]["documents"] == 20
    assert made["sources"][str(second)]["documents"] == 20  # each of `only` twice
    assert made["dropped_by_reason"] == {str(second): {EQUAL: 40}}


def test_settings_own_functions_and_evaluation_sets_are_part_of_the_identity(
    assets: Path, tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [row(f"Is it {n}?", f"It is {n}.") for n in range(20)])
    preprocess.main(options(assets, tmp_path, file, eval_share=0))
    assert manifest(tmp_path)["filters"] is None
    with pytest.raises(UserError, match="made from other input or with other settings"):
        preprocess.main(options(assets, tmp_path, file, eval_share=0, filters={"min_words": 1}))
    monkeypatch.setattr(preprocess, "FILTERS", (without_odd_numbers,))
    with pytest.raises(UserError, match="made from other input or with other settings"):
        preprocess.main(options(assets, tmp_path, file, eval_share=0))
    preprocess.main(options(assets, tmp_path, file, eval_share=0, overwrite=True))
    assert manifest(tmp_path)["dropped_by_reason"] == {str(file): {"an odd number": 10}}
    assert manifest(tmp_path)["rows_changed"] == 10
    assert dropped(tmp_path)
    monkeypatch.setattr(preprocess, "FILTERS", ())
    with pytest.raises(UserError, match="made from other input or with other settings"):
        preprocess.main(options(assets, tmp_path, file, eval_share=0))
    preprocess.main(options(assets, tmp_path, file, eval_share=0, overwrite=True))
    assert not dropped(tmp_path)


def without_odd_numbers(example: Example) -> Example | Drop:
    assert isinstance(example, Conversation)
    number = int(example.messages[1]["content"].removeprefix("It is ").removesuffix("."))
    if number % 2:
        return Drop("an odd number")
    return texts.replace(example, lambda text: text.replace("It is", "That is"))  # type: ignore[return-value]


def failing(example: Example) -> Example:
    raise ZeroDivisionError(f"of {texts.parts(example, 'turns')}")


def silent(example: Example) -> Example | None:
    return None if example else example


def test_a_comparison_that_failed_does_not_find_nothing_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise MemoryError

    comparer = RowComparer(0.8)
    with monkeypatch.context() as patch:
        patch.setattr(near_duplicates, "decide", fail)
        with pytest.raises(MemoryError):
            comparer.decide()
    with pytest.raises(RuntimeError, match="has failed before"):
        comparer.decide()


def test_keys_that_become_the_same_placeholder_keep_their_values() -> None:
    def clean(text: str) -> str:
        return pii.replace(text, ["email"])

    changed = texts.replace_all({"a@b.org": 1, "c@d.org": 2, "x": {"e@f.org": 3}}, clean, clean)
    assert changed == {"<EMAIL>": 1, "<EMAIL> 2": 2, "x": {"<EMAIL>": 3}}


def test_overlapping_names_leave_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        SimpleNamespace(start=0, end=10, entity_type="PERSON"),
        SimpleNamespace(start=5, end=15, entity_type="LOCATION"),
    ]
    analyzer = SimpleNamespace(analyze=lambda *arguments, **options: found)
    monkeypatch.setattr(names, "_analyzer", lambda model: analyzer)
    assert names.replace("John Paris Texas is here", "en_x") == "<PERSON>s is here"


def shouting(example: Example) -> Example:
    """Change the example itself, and return it."""
    assert isinstance(example, Conversation)
    example.messages[-1]["content"] = example.messages[-1]["content"].upper()
    return example


def test_a_filter_may_change_the_example_itself() -> None:
    gate = Gate.of(FilterOptions(), (shouting,), 0)
    assert gate
    raw = to_json(Conversation(row("q", "a")["messages"]))
    [found] = gate.filter_rows([{"row": raw, "problem": None}], 0)
    assert found["row"] == to_json(Conversation(row("q", "A")["messages"]))
    assert found["as_read"] == raw


def made_by(reason: str) -> Any:
    def one(example: Example) -> Drop:
        return Drop(reason)

    return one


def test_a_filter_that_fails_rejects_the_row_and_one_that_returns_nothing_stops_the_job() -> None:
    raw = {"row": b'{"completion":"a@b.org"}', "problem": None}
    gate = Gate.of(FilterOptions(), (failing,), 0)
    assert gate
    [found] = gate.filter_rows([raw], 0)
    assert found["problem"] == "the filter failing raises ZeroDivisionError: of ['', 'a@b.org']"
    gate = Gate.of(FilterOptions(pii="replace"), (failing,), 0)
    assert gate
    [found] = gate.filter_rows([raw], 0)
    assert b"a@b.org" not in found["row"]
    assert "a@b.org" not in found["problem"]
    gate = Gate.of(FilterOptions(), (silent,), 0)  # type: ignore[arg-type]
    assert gate
    with pytest.raises(UserError, match="returns NoneType; return the example"):
        gate.filter_rows([raw], 0)
    with pytest.raises(UserError, match="the filter one is defined within a function"):
        Gate.of(FilterOptions(), (made_by("x"),), 0)


def test_dropping_all_rows_is_one_sentence(assets: Path, tmp_path: Path, ray_session: None) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [row(f"Is it {n}?", f"It is {n}.") for n in range(20)])
    for number, filters in enumerate(({"min_words": 50}, {"min_words": 50, "near_duplicates": 0.9})):
        with pytest.raises(
            UserError, match=r"is left for training, because filters dropped 20 of 20 rows \(.*dropped\)"
        ):
            preprocess.main(options(assets, tmp_path / str(number), file, filters=filters))
        assert len(dropped(tmp_path / str(number))) == 20


def test_rows_that_mix_leaves_out_replace_no_others(assets: Path, tmp_path: Path, ray_session: None) -> None:
    rng = random.Random(7)
    answers = [sentence(rng, 60) for _ in range(60)]
    first = write_rows(tmp_path / "a.jsonl", [row("Which?", " ".join(words)) for words in answers])
    second = write_rows(tmp_path / "b.jsonl", [row("Which?", " ".join(edited(words, 1, rng))) for words in answers])
    filters = {"near_duplicates": 0.7}
    preprocess.main(options(assets, tmp_path, first, mix=(f"{second}=0.3",), filters=filters, eval_share=0))
    made = manifest(tmp_path)
    used = sum(counts["documents"] for counts in made["sources"].values())
    assert used == 60, "each row of a or its near-duplicate in b is used"
    assert made["rows_dropped"] < 40


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "What is it?"}\n', "has no row with a text of 8 words or more"),
        ('{"question": "What is\n', "has a bad row"),
        ("", "no rows"),
    ],
)
def test_an_evaluation_set_that_says_nothing_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=message if content else "questions.jsonl"):
        Gate.of(FilterOptions(decontaminate=(str(file),)), (), 0)


def test_an_evaluation_set_of_one_phrase_is_refused(tmp_path: Path) -> None:
    text = "Which of these answers is right in your opinion, and why do you think so?"
    file = write_rows(tmp_path / "questions.jsonl", [{"question": text, "number": n} for n in range(11)])
    with pytest.raises(UserError, match=r"in more than 10 of their rows.*; correct decontaminate"):
        Gate.of(FilterOptions(decontaminate=(str(file),)), (), 0)


def test_an_evaluation_set_in_another_encoding_is_read(tmp_path: Path) -> None:
    text = "Wo liegt das Caf\u00e9 in der kleinen Stadt am See?"
    (tmp_path / "questions.csv").write_bytes(f"question\n{text}\n".encode("latin-1"))
    assert len(contamination.read_questions([str(tmp_path / "questions.csv")], 13)) == 1


def test_texts_without_words_are_no_near_duplicates() -> None:
    assert decide(["\U0001f44d", "\U0001f600", "+ - >", ""], 0.8) == {}
    assert len(decide(["\uff21\uff22\uff23 and so on it goes", "\uff21\uff22\uff23, and so on it goes"], 0.8)) == 1


# ---------------------------------------------------------------- single rules


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("mail a.b+c@mail.example.co.uk, ok", "mail <EMAIL>, ok"),
        ("card 4111 1111 1111 1111.", "card <CARD>."),
        ("card 4111 1111 1111 1112.", "card 4111 1111 1111 1112."),
        ("pay DE89 3704 0044 0532 0130 00 now", "pay <IBAN> now"),
        ("pay DE88370400440532013000 now", "pay DE88370400440532013000 now"),
        ("until 4111 1111 1111 1111 12/26", "until <CARD> 12/26"),
        ("ES9121000418450200051332 EUR", "<IBAN> EUR"),
        ("http://8.8.8.8:8080/x", "http://<IP>:8080/x"),
        ("at 2001:4860:4860::8888 or 12:30:45", "at <IP> or 12:30:45"),
        ("at 8.8.8.8 and 192.168.0.1, v1.2.3.4.5", "at <IP> and 192.168.0.1, v1.2.3.4.5"),
        ("call +1 (212) 555-0100 or (030) 1234-567", "call <PHONE> or <PHONE>"),
        ("in 2024-01-31 and 1,234,567 or 3.14159265358", "in 2024-01-31 and 1,234,567 or 3.14159265358"),
        ("user@host and a @mention and x@y", "user@host and a @mention and x@y"),
    ],
)
def test_personal_data_is_recognized_by_its_form(text: str, clean: str) -> None:
    assert pii.replace(text, tuple(pii.PATTERNS)) == clean


def test_only_the_chosen_kinds_are_replaced_and_all_texts_of_a_row() -> None:
    assert pii.replace("a@b.org 8.8.8.8", ("ip",)) == "a@b.org <IP>"
    call = {
        "function": {"name": "send", "arguments": {"to": ["a@b.org"], "id": "a@b.org"}},
        "id": "call_a@b.org",
        "type": "function",
    }
    example = Conversation([{"role": "user", "content": "a@b.org"}, {"role": "assistant", "tool_calls": [call]}])
    changed = texts.replace(example, lambda text: pii.replace(text, ("email",)))
    assert isinstance(changed, Conversation)
    assert changed.messages[0] == {"role": "user", "content": "<EMAIL>"}
    [made] = changed.messages[1]["tool_calls"]
    assert made["function"] == {"name": "send", "arguments": {"to": ["<EMAIL>"], "id": "<EMAIL>"}}
    assert made["id"] == "call_a@b.org", "the answer to the call refers to it"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (r'{"note": "call\n+49 30 1234567", "to": "a\u0040b.org"}', '{"note": "call\\n<PHONE>", "to": "<EMAIL>"}'),
        (r' ["x\n+49 30 1234567"]', '["x\\n<PHONE>"]'),
        (r'{"a":1,   "b": "\u00e9"}', r'{"a":1,   "b": "\u00e9"}'),
        (
            '{"card": 4111111111111111, "n": 4111111111111112, "is": true}',
            '{"card": "<CARD>", "n": 4111111111111112, "is": true}',
        ),
        ("{a@b.org", "{<EMAIL>"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_personal_data_in_a_text_that_is_json_is_replaced(text: str, clean: str) -> None:
    """As in arguments of calls and answers of tools, whose escapes hide what follows from the patterns."""
    call = {"function": {"name": "send", "arguments": text}}
    example = Conversation([{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": text}])
    changed = texts.replace(example, lambda one: pii.replace(one, tuple(pii.PATTERNS)))
    assert isinstance(changed, Conversation)
    assert changed.messages[0]["tool_calls"][0]["function"]["arguments"] == clean
    assert changed.messages[1]["content"] == clean


def test_tools_and_their_calls_keep_their_names() -> None:
    """Names of people are found by what stands around them, so one place could change, and another not."""
    tools = [{"function": {"name": "Ada", "parameters": {"properties": {"Ada": {}}, "required": ["Ada"]}}}]
    call = {"function": {"name": "Ada", "arguments": {"Ada": "Ada"}}}
    example = Conversation([{"role": "assistant", "tool_calls": [call]}], tools)
    changed = texts.replace(example, lambda text: text.replace("Ada", "<PERSON>"), str)
    assert isinstance(changed, Conversation)
    assert changed.tools == tools
    assert changed.messages[0]["tool_calls"] == [{"function": {"name": "Ada", "arguments": {"Ada": "<PERSON>"}}}]


def test_the_first_rows_show_what_an_evaluation_set_contains(tmp_path: Path) -> None:
    question = " ".join(f"word{number}" for number in range(20))
    (tmp_path / "questions.jsonl").write_text(json.dumps({"text": question}) + "\n")
    rows = [{"row": to_json(Completion("", f"{question} {end}")), "problem": None} for end in range(40)]
    gate = Gate.of(FilterOptions(decontaminate=(str(tmp_path / "questions.jsonl"),)), (), 0.5)
    assert gate
    dropped = [row["dropped"] for row in gate.filter_head(rows)]
    held_out = [is_held_out(row["row"], 0.5) for row in rows]
    assert dropped == [None if one else CONTAMINATED for one in held_out]
    assert len(set(dropped)) == 2


def test_the_language_of_a_whole_text_is_recognized_without_a_download() -> None:
    english = "The weather was fine, so we walked along the river until it was dark. "
    german = "Das Wetter war sch\u00f6n, also gingen wir am Fluss entlang, bis es dunkel war. "
    assert language.detect(english)[0] == "en"
    assert language.detect(german)[0] == "de"
    assert language.detect(english[:70] + "\n" + german * 10)[0] == "de"  # also what comes after 80 characters


PROSE = (
    "The harbour of the town lies in the north of the island, and most of the people who live there work on the boats "
    "that leave before dawn. In winter the wind is so strong that they stay at home for weeks. Then they mend the "
    "nets, tell stories to each other, and wait for the sea to calm down again. Visitors rarely come at this time."
)


@pytest.mark.parametrize(
    ("text", "rule", "reason"),
    [
        (PROSE, "gopher", None),
        (PROSE, "gopher_repetition", None),
        (PROSE, "fineweb", None),
        ("too short", "gopher", "not between 50"),
        ("- " + "\n- ".join(PROSE.split(". ") * 2), "gopher", "items of a list"),
        (PROSE.replace(" ", " # ", 12), "gopher", "# or ellipsis"),
        ("1234 " * 100 + PROSE, "gopher", "without a letter"),
        ((PROSE + "\n") * 3, "gopher_repetition", "repeated lines"),
        (PROSE + " buy now" * 40, "gopher_repetition", "run of 2 words"),
        (PROSE.replace(" ", ".\n"), "fineweb", "most lines are short"),
        (PROSE.replace(".", "").replace(", ", "\n"), "fineweb", "few lines end with punctuation"),
    ],
)
def test_published_rules(text: str, rule: Any, reason: str | None) -> None:
    found = rules.broken(text, [rule])
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


def test_what_filters_see_of_a_row() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
    ]
    example = Conversation(messages, [{"name": "T"}])
    assert texts.parts(example, "turns") == ["Q", "A\nR"]
    assert texts.parts(example, "answers") == ["A\nR"]
    assert texts.parts(example, "all") == ["S", "Q", "A\nR", '[{"name": "T"}]']
    assert texts.parts(Completion("P", "C"), "turns") == ["P", "C"]
    assert texts.parts(Completion("P", "C"), "answers") == ["C"]


def test_runs_of_evaluation_sets() -> None:
    rng = random.Random(5)
    question = " ".join(sentence(rng, 30))
    short, phrase = " ".join(sentence(rng, 9)), " ".join(sentence(rng, 14))
    found = [contamination.of_parts([one], 13) for one in (question, short, "what is it", "")]
    questions = contamination.rare([*found, *[contamination.of_parts([phrase], 13)] * 11])
    examples = [
        [question],
        ["so: " + " ".join(question.split()[5:18])],
        [short],
        [f"x {short}"],
        ["what is it"],
        [phrase],
    ]
    assert contained(questions, examples) == [True, True, True, False, False, False]
    assert contained(questions, [[], [""]]) == [False, False]
    assert contained(contamination.NONE, examples) == [False] * 6


def contained(hashes: np.ndarray, examples: list[list[str]]) -> list[bool]:
    return contamination.contains(Questions.of(hashes), *word_runs.words_of(examples), 13).tolist()


def test_rows_of_the_demo_pass_all_filters_but_the_strict_rules(assets: Path) -> None:
    gate = Gate.of(FilterOptions(languages=("en",), pii="replace"), (), 0)
    assert gate
    head = row_sources.head(row_sources.find(str(assets / "data")), 100)
    assert all(one["dropped"] is None and one["as_read"] is None for one in gate.filter_rows(head.rows, 0))


def test_bad_rows_are_saved_without_personal_data() -> None:
    gate = Gate.of(FilterOptions(pii="replace"), (), 0)
    assert gate
    raw = [
        {"row": json.dumps({"a": "Call me\n+49 30 1234567\nor\n8.8.4.4"}).encode(), "problem": "no known columns"},
        {"row": b'{"a": "a\\u0040b.org"}', "problem": "no known columns"},
        {"row": b'{"a": "a@b.org', "problem": "not valid JSON"},
    ]
    raw.append({"row": b'{"a@b.org": 1}', "problem": "no known columns"})
    *found, key = [one["row"] for one in gate.filter_rows(raw, 0)]
    assert key == b'{"<EMAIL>": 1}'
    assert found == [b'{"a": "Call me\\n<PHONE>\\nor\\n<IP>"}', b'{"a": "<EMAIL>"}', b""]


@pytest.mark.parametrize(
    "bad",
    [
        {"near_duplicates": 2},
        {"pii": "hide"},
        {"rules": ["c5"]},
        {"max_word": 3},
        {"pii_names": "x"},
        {"languages": ["english"]},
        {"languages": ["EN"]},
    ],
)
def test_wrong_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"1 validation error"):
        FilterOptions.model_validate(bad)


NAMES = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])  # what the tests' environment has comes first
import spacy
from raymill.data.filters.gate import Gate
from raymill.data.filters.options import FilterOptions
model = spacy.blank("en")
ruler = model.add_pipe("entity_ruler")
ruler.add_patterns([{"label": "PERSON", "pattern": "Ada Lovelace"}, {"label": "GPE", "pattern": "London"}])
packages = Path(sys.argv[1])
model.to_disk(packages / "en_names")
(packages / "en_names" / "__init__.py").write_text('''
from spacy.util import load_model_from_path
def load(**options):
    return load_model_from_path(__import__("pathlib").Path(__file__).parent, **options)
''')
(packages / "en_names-1.2.3.dist-info").mkdir()
(packages / "en_names-1.2.3.dist-info" / "METADATA").write_text("Name: en_names\\nVersion: 1.2.3\\n")
gate = Gate.of(FilterOptions(pii="replace", pii_names="en_names"), (), 0)
text = "Ada Lovelace (a@b.org) of London. " + "x " * 300_000 + "Ada Lovelace, " + "y" * 1_100_000
[row] = gate.filter_rows([{"row": ('{"completion":"%s"}' % text).encode(), "problem": None}], 0)
changed = row["row"].decode()
print(changed[:60], changed.count("<PERSON>"), "Ada" in changed, len(changed) > 1_600_000, gate.identity()["presidio"])
"""


@pytest.mark.nightly  # installs 300 MB
def test_presidio_finds_names(tmp_path: Path) -> None:
    """Real Presidio and spaCy, with a model of rules, because no package index has spaCy's trained models."""
    packages = tmp_path / "packages"
    uv = environment.find_uv()
    subprocess.run([uv, "pip", "install", "--quiet", "--target", packages, "presidio-analyzer"], check=True)
    command = [sys.executable, "-c", NAMES, str(packages)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=settings.PROJECT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert '{"completion":"<PERSON> (<EMAIL>) of <LOCATION>. x x' in done.stdout
    assert re.search(r" 2 False True \['[0-9.]+', '1.2.3'\]$", done.stdout.strip())


def test_names_need_presidio_and_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"pii_names needs the package presidio-analyzer, .* Add presidio-analyzer to"):
        Gate.of(FilterOptions(pii="drop", pii_names="en_core_web_lg"), (), 0)
    has_presidio = {"presidio_analyzer": True}
    monkeypatch.setattr(optional.importlib.util, "find_spec", has_presidio.get)
    with pytest.raises(UserError, match="pii_names needs the package en_core_web_lg, which is not installed"):
        Gate.of(FilterOptions(pii="drop", pii_names="en_core_web_lg"), (), 0)


# ---------------------------------------------------------------- the table of the documentation

ROWS, PLANTED = 1000, 100
GERMAN = ["der", "und", "nicht", "wir", "haben", "eine", "stra\u00dfe", "mit", "f\u00fcr", "gehen", "kinder", "schon"]
ENGLISH = ["the", "and", "not", "we", "have", "street", "with", "for", "walk", "children", "already", "because"]


def spoken(rng: random.Random, words: list[str], count: int = 30) -> str:
    return " ".join(rng.choices(words, k=count))


def planted_rows(kind: str) -> tuple[list[Example], set[int], dict[str, Any], list[str]]:
    """Return examples, the numbers of those with a planted fault, the settings, and evaluation questions."""
    rng = random.Random(kind)
    answers = [sentence(rng, rng.randint(80, 150)) for _ in range(ROWS)]
    faults, questions, settings_ = set(rng.sample(range(1, ROWS, 2), PLANTED)), list[str](), dict[str, Any]()
    lines = [" ".join(words) for words in answers]
    if kind == "near_duplicates":
        settings_ = {"near_duplicates": 0.8}
        for at in faults:  # the row before it, with one other word: at least 0.87 similar
            lines[at] = " ".join(edited(answers[at - 1], 1, rng))
    elif kind == "decontaminate":
        questions = [" ".join(sentence(rng, 20)) for _ in range(PLANTED)]
        for at, question in zip(sorted(faults), questions, strict=True):
            lines[at] += f" {question}, {lines[at]}"
    elif kind == "languages":
        settings_ = {"languages": ("en",)}
        lines = [spoken(rng, GERMAN if at in faults else ENGLISH) for at in range(ROWS)]
    elif kind == "min_words":
        settings_ = {"min_words": 20}
        for at in faults:
            lines[at] = " ".join(lines[at].split()[:15])
    elif kind == "gopher_repetition":
        settings_ = {"rules": ("gopher_repetition",)}
        for at in faults:
            lines[at] = " ".join([" ".join(answers[at][:8])] * 10)
    else:
        settings_ = {"pii": "drop"}
        for number, at in enumerate(sorted(faults)):
            lines[at] += (f" mail a{number}@b.org", " +49 30 12345678", " 4111 1111 1111 1111", " 8.8.4.4")[number % 4]
    return [Completion("", line) for line in lines], faults, settings_, questions


def found_rows(kind: str) -> tuple[set[int], set[int]]:
    """Return the numbers of the planted rows, and of those that the filter drops: of a pair, perhaps the first."""
    examples, faults, settings_, questions = planted_rows(kind)
    if kind == "near_duplicates":
        lines = [example.completion for example in examples if isinstance(example, Completion)]
        gone = decide(lines, settings_["near_duplicates"])
        return faults, {at if at in faults else at + 1 for at, line in enumerate(lines) if line in gone}
    if kind == "decontaminate":
        runs = contamination.rare([contamination.of_parts([question], 13) for question in questions])
        hits = contained(runs, [texts.parts(example, "turns") for example in examples])
        return faults, set(np.flatnonzero(hits).tolist())
    gate = Gate.of(FilterOptions(**settings_), (), 0)
    assert gate
    screened = gate.filter_rows([{"row": to_json(example), "problem": None} for example in examples], 0)
    return faults, {at for at, one in enumerate(screened) if one["dropped"]}


def table() -> str:
    lines = ["| filter | planted | found | wrongly dropped |", "|---|---|---|---|"]
    for kind in ("near_duplicates", "decontaminate", "languages", "min_words", "gopher_repetition", "pii"):
        faults, found = found_rows(kind)
        lines.append(f"| `{kind}` | {len(faults)} | {len(faults & found)} | {len(found - faults)} |")
    return "\n".join(lines)


def test_the_documented_table_is_true() -> None:
    page = (settings.PROJECT / "docs" / "filters.md").read_text(encoding="utf-8")
    assert table() in page, f"put this table into docs/filters.md:\n{table()}"
