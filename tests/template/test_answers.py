"""Test that a bad answer to a question gives one error and leaves no files, and that the defaults make a project."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cookiecutter import cli, config

REFUSED = {
    "project_name": [
        *('say "hi"', "it's", "back`tick", '"""', "\\", 'a\\"""; import os #', "{{ 7 * 7 }} {", "$(id)", "<b>"),
        *("two\nlines", "a\ttab", "bell\a", "left \N{RIGHT-TO-LEFT OVERRIDE} right", "smile \N{GRINNING FACE}"),
        *("a/b", "a\\b", "C:\\llm", "a: b", "a#b", "", " ", "7 seas", "-dash", ".hidden", "class", "None", "x" * 61),
    ],
    "project_slug": [
        *("", "a/b", "../x", "/tmp/x", "a\\b", ".", "..", "line\nline", "quote'd", 'double"d', "two words", "größe"),
        *("My-LLM", "under_score", "dot.ted", "a--b", "-a", "a-", "7b-llm", "ab", "x" * 31, "class", "lambda"),
    ],
    "aws_region": ["", "us-west-9", "eu-west-3", "US-EAST-1", "us-east-1a", "us-east-1\n", "'us-east-1'"],
    "instance_type": ["", "m6i.2xlarge", "p3dn.24xlarge", "P4D.24xlarge", "p4d", "p4d.24xlarge\n"],
    "max_workers": ["", "0", "-1", "1.5", "two", "65", "1e1", "02", " 2", "1_0", "\N{FULLWIDTH DIGIT TWO}", "True"],
    "base_model": [
        *("", "qwen", "a/b/c", "a b/c", "owner/na\nme", 'o/"n"', "owner/", "/", "s3://"),
        *("https://hub.example/a/b", "a/b; rm -rf /", "owner/../name"),
    ],
}


def run(template: Path, folder: Path, *answers: str) -> Result:
    """Run the cookiecutter command."""
    (folder / "out").mkdir(exist_ok=True)
    return CliRunner().invoke(cli.main, [str(template), "--no-input", "-o", str(folder / "out"), *answers])


@pytest.fixture(autouse=True)
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep cookiecutter away from the user's home, where it saves answers and reads defaults."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setattr(config, "USER_CONFIG_PATH", str(folder / "none.yaml"))
    monkeypatch.setitem(config.DEFAULT_CONFIG, "replay_dir", str(folder))


@pytest.mark.parametrize(
    ("question", "answer"), [(question, answer) for question, answers in REFUSED.items() for answer in answers]
)
def test_a_bad_answer_gets_one_sentence_and_leaves_nothing(
    template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], question: str, answer: str
) -> None:
    result = run(template, tmp_path, f"{question}={answer}")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)  # not a traceback
    printed = capfd.readouterr().err + result.stderr
    assert printed.startswith(f"error: {question} ")
    assert printed.count("\n") == 1, printed
    assert list((tmp_path / "out").iterdir()) == []
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_the_command_line_prints_only_the_error(template: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "cookiecutter",
        str(template),
        "--no-input",
        "--default-config",
        "max_workers=none",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: max_workers 'none' must be a whole number from 1 to 64. Try 2\n"
    assert result.stdout == "Hook script failed (exit status: 1)\n"


def test_a_type_that_the_region_does_not_offer_is_refused(
    template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(template, tmp_path, "instance_type=p4de.24xlarge", "aws_region=us-east-2")
    assert result.exit_code == 1
    assert "does not offer p4de.24xlarge. Use one of: us-east-1," in capfd.readouterr().err


@pytest.mark.parametrize("name", ["p5.48xlarge", "p6-b200.48xlarge", "g5.xlarge", "g6.48xlarge", "g6e.12xlarge"])
def test_every_type_of_the_projects_table_is_accepted(template: Path, tmp_path: Path, name: str) -> None:
    result = run(template, tmp_path, f"instance_type={name}")
    assert result.exit_code == 0, result.output
    assert f" {name}\n" in (tmp_path / "out" / "my-llm" / "cluster" / "cluster.yaml").read_text()


def test_a_new_type_needs_a_line_in_one_file(template: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(template, tmp_path / "template"))
    table = copy / "raymill" / "instance_types.py"
    first = "        InstanceType("
    new = f'{first}"g7e.2xlarge", G6E, L40S, 1, 8, 64, 1900, 5, 0),\n'
    table.write_text(table.read_text().replace(first, new + first, 1))
    options = ["--no-input", "--default-config", "instance_type=g7e.2xlarge"]
    for source, code in ((template, 1), (copy, 0)):
        command = [sys.executable, "-m", "cookiecutter", str(source), *options]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == code, result.stderr
        assert ("is not a GPU instance type. Use one of: p4d.24xlarge, p4de" in result.stderr) == bool(code)


def test_a_folder_that_exists_is_not_changed(template: Path, tmp_path: Path) -> None:
    kept = tmp_path / "out" / "my-llm" / "mine.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    assert run(template, tmp_path).exit_code == 1
    assert run(template, tmp_path, "project_slug=My LLM").exit_code == 1
    assert list(kept.parent.iterdir()) == [kept]


def test_the_defaults_make_a_project(template: Path, tmp_path: Path) -> None:
    result = run(template, tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "my-llm" / "settings.toml").is_file()
