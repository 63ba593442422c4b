"""Test the values that are read from cluster.yaml, and the errors for files that cannot be read."""

from pathlib import Path

import pytest

from raymill.common import cluster_file
from raymill.errors import UserError


def changed(folder: Path, old: str, new: str) -> Path:
    """Write a copy of cluster.yaml with `new` in place of `old`, and return its path."""
    text = cluster_file.FILE.read_text(encoding="utf-8")
    assert old in text
    file = folder / "cluster.yaml"
    file.write_text(text.replace(old, new))
    return file


def test_the_node_types_are_read() -> None:
    file = cluster_file.load()
    assert (file.head.market, file.head.max_workers) == ("on-demand", 1)
    assert {worker.market for worker in file.workers} == {"spot", "on-demand"}
    assert {worker.zone for worker in file.workers} == {"", "1", "2", "3"}
    assert all(worker.max_workers <= file.max_workers for worker in file.workers)


def test_the_digest_changes_only_with_the_file(tmp_path: Path) -> None:
    assert cluster_file.load().digest == cluster_file.load().digest
    other = changed(tmp_path, "idle_timeout_minutes: 5", "idle_timeout_minutes: 6")
    assert cluster_file.load(other).digest != cluster_file.load().digest


def test_a_broken_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not valid YAML"):
        cluster_file.load(changed(tmp_path, "cluster_name:", "cluster_name: ["))
    with pytest.raises(UserError, match="lacks 'auth'"):
        cluster_file.load(changed(tmp_path, "auth:", "oath:"))
    with pytest.raises(UserError, match="is missing"):
        cluster_file.load(tmp_path / "none.yaml")
