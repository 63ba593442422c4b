"""Test the doctor's checks of this machine, with one problem at a time."""

import platform
import shutil
from pathlib import Path

import pytest

from raymill import settings
from raymill.local import doctor


def texts(status: str) -> list[str]:
    return [finding.text for finding in doctor.check() if finding.status == status]


def test_this_project_is_sound() -> None:
    assert texts("error") == []


def test_a_broken_setting_is_named_by_line_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = settings.FILE.read_text().replace('precision = "fp32"', 'precision = "fp31"')
    (tmp_path / "settings.toml").write_text(text)
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": tmp_path / "settings.toml"})
    (sentence,) = texts("error")
    line = text.splitlines().index('precision = "fp31"') + 1
    assert sentence.startswith(f"in profile local: settings.toml line {line}, key local.train.precision: ")


def test_a_section_that_nothing_reads_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.toml").write_text(settings.FILE.read_text().replace("[cluster.budget]", "[cluster.bugdet]"))
    monkeypatch.setattr(settings, "FILE", tmp_path / "settings.toml")
    (sentence,) = texts("error")
    assert "there is no section [cluster.bugdet]. Did you mean [cluster.budget]?" in sentence


def test_an_accelerator_that_ray_does_not_know_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = settings.FILE.read_text().replace('accelerator = "gpu"', 'accelerator = "A1000"')
    (tmp_path / "settings.toml").write_text(text)
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": tmp_path / "settings.toml"})
    (sentence,) = texts("error")
    assert sentence.startswith(
        "in profile cluster: Ray does not know the accelerator 'A1000'. Set accelerator in [serve]"
    )


def test_a_missing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (sentence,) = texts("error")
    assert "apt-get install g++" in sentence


def test_on_a_mac_the_jobs_that_do_not_run_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert any("serve_llm, generate and finetune_deepspeed need Linux" in sentence for sentence in texts("warning"))


def test_an_env_file_that_others_can_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("HF_TOKEN=x\n")
    (tmp_path / ".env").chmod(0o644)
    (tmp_path / "requirements").symlink_to(settings.PROJECT / "requirements")
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    (sentence,) = texts("error")
    assert "chmod 600 .env" in sentence
