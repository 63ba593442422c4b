"""Test how `./inv faults` chooses faults. This needs no project and no emulated AWS."""

import subprocess
import sys

import pytest

import bake
from faults import catalog


@pytest.mark.parametrize(
    ("only", "count"), [("", 43), (",", 43), ("limit", 2), ("limit,", 2), ("time limit , spend", 2)]
)
def test_words_choose_the_faults_whose_names_contain_them(only: str, count: int) -> None:
    assert len(catalog.choose(only)) == count


@pytest.mark.parametrize("only", ["nonsuch", "limit, nonsuch,"])
def test_an_unknown_word_starts_nothing(only: str) -> None:
    done = inv("faults", "--only", only)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no fault name contains 'nonsuch'. List the names with: ./inv faults --list\n"


def test_list_shows_the_names_and_starts_nothing() -> None:
    done = inv("faults", "--list", "--only", "limit")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["time limit", "spend limit"]


def inv(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a verb of the template."""
    return subprocess.run(
        [sys.executable, "-m", "invoke", *words], cwd=bake.TEMPLATE, capture_output=True, text=True, check=False
    )
