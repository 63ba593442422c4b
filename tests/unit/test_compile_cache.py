"""Test that a kernel whose compilation was killed is compiled again."""

import os
import time
from pathlib import Path

import pytest

from raymill.ray_support import compile_cache


def test_only_libraries_that_no_linker_will_finish_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "cb").mkdir()
    contents = {"empty.so": "", "cut_off.so": "\0" * 9, "being_linked.so": "", "whole.so": "\x7fELF", "done.lock": ""}
    for name, text in contents.items():
        (tmp_path / "cb" / name).write_text(text)
        age_s = 0 if name == "being_linked.so" else 2 * compile_cache.LINKING_S
        os.utime(tmp_path / "cb" / name, (time.time() - age_s,) * 2)
    compile_cache.remove_truncated()
    assert {file.name for file in (tmp_path / "cb").iterdir()} == contents.keys() - {"empty.so", "cut_off.so"}
