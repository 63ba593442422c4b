"""Test the page about a data set that `inv data` draws."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from invoke import Context, Exit
from preprocess_job import options, write_rows
from rich.console import Console

from jobs import preprocess
from raymill.data import report, samples
from raymill.data.filters.options import FilterOptions
from raymill.errors import UserError

EVIL = "<script>alert(1)</script>"
GERMAN = "Der schnelle braune Fuchs springt über den faulen Hund, und die Kinder lachen laut."
LONG = "The lazy dog sleeps in the warm sun while the children walk along the street. " * 40


def row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def folder(assets: Path, tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Path:
    """Return the output folder of a run with filters, bad rows, and foreign text."""
    made = tmp_path_factory.mktemp("page")
    rows = [row(f"question {number}", GERMAN + f" {number}") for number in range(30)]
    rows += [row("an attack", f"{EVIL} is what I say to all of you who read this page today."), row("long", LONG)]
    rows += [row("short one", "No."), row("mail", "Write to someone@example.org about all of this, please.")]
    rows += [{"instruction": EVIL}]
    changes = {
        "input": str(write_rows(made / "rows.jsonl", rows)),
        "max_bad_share": 0.5,
        "eval_share": 0.0,
        "filters": FilterOptions(pii="drop", min_words=4),
    }
    preprocess.main(options(assets, made, **changes))
    return made / "packed"


def drawn(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(report, "FILE", tmp_path / "results" / "data.html")
    report.draw(str(folder), Console(width=200))
    return report.FILE.read_text(encoding="utf-8")


def test_the_page_shows_documents_lengths_languages_and_rows_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = drawn(folder, monkeypatch, tmp_path)
    assert "documents, languages and rows left out:" in capsys.readouterr().out
    for shown in (
        "35 rows were read",
        "fewer words than min_words",
        "personal data",
        "<td>de</td>",
        "tokens per document",
    ):
        assert shown in page, shown
    assert "<mark>Der schnelle braune Fuchs" in page
    assert page.count("<details") >= 20 + 2 * samples.EXTREME
    shortest, longest = page.index("The shortest documents"), page.index("The longest documents")
    assert LONG[:200] in page[longest:]
    assert LONG[:200] not in page[shortest:longest]


def test_the_verb_draws_the_page_of_a_folder(
    folder: Path, tmp_path: Path, tasks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "FILE", tmp_path / "results" / "data.html")
    tasks.data(Context(), folder=str(folder))
    assert "<mark>Der schnelle braune Fuchs" in report.FILE.read_text(encoding="utf-8")
    with pytest.raises(Exit, match=r"error: .*/absent holds no complete data set"):
        tasks.data(Context(), folder="absent")


def test_foreign_text_is_escaped_and_personal_data_is_not_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = drawn(folder, monkeypatch, tmp_path)
    assert EVIL not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3, (
        "the title of a document, the document, and a bad row"
    )
    assert "someone@example.org" not in page
    assert "someone@example.org" not in (folder / samples.FILE).read_text()


def test_samples_are_the_shortest_and_the_longest_of_all_documents(folder: Path) -> None:
    found = samples.Samples.model_validate_json((folder / samples.FILE).read_text())
    tokens = sorted(one.tokens for one in found.random)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(tokens) == manifest["train"]["documents"], "all documents, because there are few"
    assert sum(tokens) == manifest["train"]["tokens"]
    assert sum(one.trained_tokens for one in found.random) == manifest["train"]["trained_tokens"]
    assert [one.tokens for one in found.shortest] == tokens[:3]
    assert [one.tokens for one in found.longest] == tokens[:-4:-1]


def test_a_folder_without_a_data_set_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no complete data set .*Make one with inv submit preprocess"):
        report.draw(str(tmp_path), Console())
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot be read .*Pass another --folder"):
        report.draw(str(tmp_path), Console())
    (tmp_path / "manifest.json").write_bytes((folder / "manifest.json").read_bytes())
    (tmp_path / "samples").mkdir()
    (tmp_path / samples.FILE).write_text("{")
    with pytest.raises(UserError, match=r"cannot be read .*Pass another --folder") as caught:
        report.draw(str(tmp_path), Console())
    assert "\n" not in str(caught.value)


def test_a_data_set_of_an_older_version_has_a_page_without_documents(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").write_bytes((folder / "manifest.json").read_bytes())
    page = drawn(tmp_path, monkeypatch, tmp_path)
    assert "so the page shows no documents" in capsys.readouterr().out
    assert "35 rows were read" in page
