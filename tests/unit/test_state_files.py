"""Test that files are replaced as a whole."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import full_disk
import pytest

from raymill import settings, settings_file, state_files


def test_several_can_replace_a_file_at_once(tmp_path: Path) -> None:
    file, texts = tmp_path / "file", [str(number) * 10_000 for number in range(8)]
    with ThreadPoolExecutor(len(texts)) as threads:
        list(threads.map(lambda text: state_files.replace(file, text), texts * 20))
    assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_keeps_its_mode_and_a_new_one_is_private(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "old").chmod(0o640)
    (tmp_path / "link").symlink_to("old")
    for name, mode in (("link", 0o640), ("new", 0o600)):
        state_files.replace(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    assert (tmp_path / "link").is_symlink()


def test_a_full_disk_keeps_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(settings.FILE.read_text(encoding="utf-8"), encoding="utf-8")
    full_disk.fill(monkeypatch, file)
    with pytest.raises(OSError, match="No space left"):
        settings_file.write({"cluster.limits": {"hours": 1}}, file)
    assert file.read_text(encoding="utf-8") == settings.FILE.read_text(encoding="utf-8")
