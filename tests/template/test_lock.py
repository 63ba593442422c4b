"""Test that `./inv lock --latest` keeps newer versions only if they pass the tests, and that `./inv lock` stores only
the pinned scripts. A stub replaces commands.
"""

import base64
import contextlib
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import invoke
import pytest

import bake
from raymill import environment


def load_tasks() -> Any:
    """Import the template's tasks.py. `import tasks` would find the project's."""
    spec = importlib.util.spec_from_file_location("template_tasks", bake.TEMPLATE / "tasks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "enter", lambda: None)  # it could replace this process
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


tasks = load_tasks()

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
    for name in ("cookiecutter.json", "requirements.txt", CLUSTER_PINS, str(tasks.VLLM_ARGUMENTS)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((template / name).read_bytes())
    monkeypatch.setattr(bake, "TEMPLATE", tmp_path)
    monkeypatch.setattr(bake, "BUILD", tmp_path / "build")
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


class Npm:
    """Stands in for invoke's context: `npm pack` writes a package with these files."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive

    def run(self, command: str, **_: Any) -> None:
        words = shlex.split(command)
        assert words[:2] == ["npm", "pack"]
        assert words[-1] == "marked@1.0.0"
        shutil.copy(self.archive, words[words.index("--pack-destination") + 1])


def packed(folder: Path, script: str) -> Path:
    """Return an npm package with this script, and a license."""
    files = folder / "package"
    files.mkdir()
    (files / "a.js").write_text(script, encoding="utf-8")
    (files / "LICENSE").write_text("MIT", encoding="utf-8")
    with tarfile.open(folder / "marked-1.0.0.tgz", "w:gz") as archive:
        archive.add(files, "package")
    return folder / "marked-1.0.0.tgz"


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose packages.json lists an npm package, without its integrity."""
    monkeypatch.setattr(shutil, "which", lambda _: "npm")
    (tmp_path / "third_party").mkdir()
    (tmp_path / "packed").mkdir()
    files = {"marked.js": {"source": "a.js", "sha256": ""}, "marked.LICENSE": {"source": "LICENSE", "sha256": ""}}
    packages = {"marked": {"version": "1.0.0", "integrity": "", "files": files}}
    (tmp_path / "third_party" / "packages.json").write_text(json.dumps(packages), encoding="utf-8")
    return tmp_path / "third_party"


def test_lock_stores_the_pinned_scripts(third_party: Path, tmp_path: Path) -> None:
    archive = packed(tmp_path / "packed", "{{ 1 }}")
    pins = third_party / "packages.json"
    integrity = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    pins.write_text(pins.read_text().replace('"integrity": ""', f'"integrity": "sha512-{integrity}"'))
    tasks._fetch_scripts(Npm(archive), third_party)
    assert (third_party / "marked.js").read_text() == "{{ 1 }}"
    assert (third_party / "marked.LICENSE").read_text() == "MIT"
    stored = json.loads(pins.read_text())["marked"]["files"]
    assert stored["marked.js"]["sha256"] == hashlib.sha256(b"{{ 1 }}").hexdigest()


def test_lock_rejects_scripts_that_are_not_the_pinned_ones(third_party: Path, tmp_path: Path) -> None:
    archive = packed(tmp_path / "packed", "evil()")
    before = (third_party / "packages.json").read_text()
    with pytest.raises(invoke.Exit, match=r"the integrity of marked@1\.0\.0 is sha512-\S+, but "):
        tasks._fetch_scripts(Npm(archive), third_party)
    assert [file.name for file in third_party.iterdir()] == ["packages.json"]
    assert (third_party / "packages.json").read_text() == before


def test_lock_needs_npm(third_party: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(invoke.Exit, match="npm is not installed"):
        tasks._fetch_scripts(Npm(tmp_path), third_party)
