"""The doctor's findings: each is right about a machine or a file that was made so."""

import platform
import shutil
from pathlib import Path

import pytest

import settings
from cluster import doctor


def texts(verdict: str) -> list[str]:
    return [finding.text for finding in doctor.local() if finding.verdict == verdict]


def test_this_project_is_sound() -> None:
    assert texts("wrong") == []


def test_a_broken_setting_is_named_by_line_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = settings.FILE.read_text().replace('precision = "fp32"', 'precision = "fp31"')
    (tmp_path / "settings.toml").write_text(text)
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": tmp_path / "settings.toml"})
    (sentence,) = texts("wrong")
    line = text.splitlines().index('precision = "fp31"') + 1
    assert sentence.startswith(f"in profile local: settings.toml line {line}, key local.train.precision: ")


def test_an_accelerator_that_ray_does_not_know_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = settings.FILE.read_text().replace('accelerator = "A100"', 'accelerator = "A1000"')
    (tmp_path / "settings.toml").write_text(text)
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": tmp_path / "settings.toml"})
    (sentence,) = texts("wrong")
    assert sentence.startswith(
        "in profile cluster: Ray does not know the accelerator 'A1000'. Set accelerator in [serve]"
    )


def test_a_missing_compiler_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (sentence,) = texts("wrong")
    assert "apt-get install g++" in sentence


def test_a_mac_is_told_what_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert any("all but serve_llm" in sentence for sentence in texts("note"))


def test_an_env_file_that_others_can_read_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("HF_TOKEN=x\n")
    (tmp_path / ".env").chmod(0o644)
    (tmp_path / "requirements").symlink_to(settings.PROJECT / "requirements")
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    (sentence,) = texts("wrong")
    assert "chmod 600 .env" in sentence
