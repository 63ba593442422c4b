"""What the verbs read of cluster.yaml, and how it is refused when it cannot be read."""

from pathlib import Path

import pytest

import settings
from cluster.common import cluster_file


def changed(folder: Path, old: str, new: str) -> Path:
    """cluster.yaml with one place changed."""
    text = cluster_file.FILE.read_text(encoding="utf-8")
    assert old in text
    file = folder / "cluster.yaml"
    file.write_text(text.replace(old, new))
    return file


def test_the_machines_that_may_be_rented() -> None:
    file = cluster_file.load()
    assert (file.head.market, file.head.most) == ("on-demand", 1)
    assert {worker.market for worker in file.workers} == {"spot", "on-demand"}
    assert {worker.zone for worker in file.workers} == {"", "1", "2", "3"}
    assert all(worker.most <= file.most_workers for worker in file.workers)


def test_its_digest_changes_with_the_file_and_is_the_same_otherwise(tmp_path: Path) -> None:
    assert cluster_file.load().digest == cluster_file.load().digest
    other = changed(tmp_path, "idle_timeout_minutes: 5", "idle_timeout_minutes: 6")
    assert cluster_file.load(other).digest != cluster_file.load().digest


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(settings.UserError, match="not valid YAML"):
        cluster_file.load(changed(tmp_path, "cluster_name:", "cluster_name: ["))
    with pytest.raises(settings.UserError, match="lacks 'auth'"):
        cluster_file.load(changed(tmp_path, "auth:", "oath:"))
    with pytest.raises(settings.UserError, match="is missing"):
        cluster_file.load(tmp_path / "none.yaml")
