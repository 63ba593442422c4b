"""Test that benchmark results are stored by day, and that their tables are written between two marks in a README."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder like benchmarks/, with results and tables of an earlier day."""
    (tmp_path / "README.md").write_text(f"before\n{report.BEGIN}\nold tables\n{report.END}\nafter\n", encoding="utf-8")
    (tmp_path / "results").mkdir()
    earlier = {"one": made("2026-01-01", 0.5), "other": made("2026-01-01", 1.5)}
    (tmp_path / "results" / "2026-01-01-training.json").write_text(json.dumps(earlier), encoding="utf-8")
    return tmp_path


def made(date: str, ratio: float) -> dict[str, Any]:
    """Return a benchmark's result in the format that `keep` writes."""
    return {
        "title": "A part",
        "date": date,
        "machine": "a machine",
        "commit": "abc",
        "versions": {"ray": "1"},
        "seconds": 9.0,
        "bars": [report.at_least(0.95, "ratio", ratio)],
        "rounds": [{"round": 1, "tokens/s": 12345.6}],
    }


def test_the_latest_result_of_each_part_is_shown(folder: Path) -> None:
    report.keep("one", made("", 0.97), folder)
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old tables" not in text
    assert "| ratio | 0.97 | at least 0.95 |" in text
    assert "| ratio | 1.5 | at least 0.95 |" in text  # a benchmark that did not run again keeps its result
    assert "| 1 | 12,346 |" in text
    assert "0.5" not in text


def test_a_second_result_on_the_same_day_replaces_the_first(folder: Path) -> None:
    for name, ratio in (("one", 0.97), ("other", 0.5), ("one", 0.99)):
        report.keep(name, made("", ratio), folder)
    files = sorted(file.name for file in (folder / "results").iterdir())
    assert len(files) == 2
    kept = json.loads((folder / "results" / files[1]).read_text(encoding="utf-8"))
    assert {name: part["bars"][0]["measured"] for name, part in kept.items()} == {"one": 0.99, "other": 0.5}
    assert "| ratio | **0.5, missed** | at least 0.95 |" in (folder / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_the_marks() -> None:
    text = (report.FOLDER / "README.md").read_text(encoding="utf-8")
    assert text.count(report.BEGIN) == text.count(report.END) == 1
