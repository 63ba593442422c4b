"""Test that `./inv lock --latest` keeps newer versions only if they pass the tests. A stub replaces commands."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import invoke
import pytest

import bake
import tasks

CLUSTER_PINS = f"{bake.PROJECT.name}/requirements/cluster.txt"


class Commands:
    """Stands in for invoke's context: `uv` finds newer versions, `lock` writes pins, and `test` passes or fails."""

    def __init__(self, failing: str, found: str) -> None:
        self.failing = failing
        self.found = found
        self.folder = Path.cwd()

    @contextlib.contextmanager
    def cd(self, folder: str) -> Iterator[None]:
        self.folder = Path(folder)
        yield

    def run(self, command: str, **options: Any) -> SimpleNamespace:
        if "pip compile" in command:
            assert options["in_stream"].read().startswith("ray[default,train,serve,data,llm]\n")
            return SimpleNamespace(stdout=self.found)
        verb = command.split()[-1]
        if verb == "lock":
            versions = json.loads((self.folder / "cookiecutter.json").read_text(encoding="utf-8"))
            pins = self.folder / bake.PROJECT.name / "requirements" / "cluster.txt"
            pins.write_text(f"transformers=={versions['_transformers']}\n", encoding="utf-8")
        return SimpleNamespace(failed=verb == self.failing)


@pytest.fixture
def copy(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small copy of the template, which the verb uses as the template."""
    for name in ("cookiecutter.json", CLUSTER_PINS, f"{bake.PROJECT.name}/{tasks.VLLM_ARGUMENTS}"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((template / name).read_bytes())
    monkeypatch.setattr(bake, "TEMPLATE", tmp_path)
    monkeypatch.setattr(tasks, "BUILD", tmp_path / "build")
    return tmp_path


def texts(copy: Path) -> list[str]:
    return [(copy / name).read_text() for name in ("cookiecutter.json", CLUSTER_PINS)]


def found(copy: Path, **newer: str) -> str:
    """Return what uv prints: the pinned versions, except the newer ones."""
    content = json.loads((copy / "cookiecutter.json").read_text(encoding="utf-8"))
    names = ("ray", "torch", "transformers", "deepspeed", "vllm")
    return "".join(f"{name}=={newer.get(name, content[f'_{name}'])}{os.linesep}" for name in names)


@pytest.mark.parametrize("failing", ["lock", "test"])
def test_versions_that_fail_change_nothing(copy: Path, failing: str) -> None:
    before = texts(copy)
    with pytest.raises(invoke.Exit, match=rf"{failing} fails with transformers [\d.]+ → 99\.0\. Nothing is changed"):
        tasks._try_latest(Commands(failing, found(copy, transformers="99.0")))
    assert texts(copy) == before


def test_versions_that_pass_are_kept(copy: Path) -> None:
    tasks._try_latest(Commands("", found(copy, transformers="99.0")))
    settings, pins = texts(copy)
    assert json.loads(settings)["_transformers"] == "99.0"
    assert pins == "transformers==99.0\n"


def test_the_newest_versions_are_not_tested_again(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks._try_latest(Commands("lock", found(copy)))
    assert "these are the newest versions that fit together: ray " in capsys.readouterr().out
