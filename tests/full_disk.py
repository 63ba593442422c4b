"""A disk without space, for files that `state_files.replace` writes."""

from pathlib import Path

import pytest

from raymill import state_files


def fill(monkeypatch: pytest.MonkeyPatch, *files: Path) -> None:
    """Let each write to these files fail as on a full disk."""
    name_of = state_files.partial_name

    def partial_name(file: Path) -> Path:
        partial = name_of(file)
        if file in files:
            partial.symlink_to("/dev/full")  # `replace` deletes the link again
        return partial

    monkeypatch.setattr(state_files, "partial_name", partial_name)
