"""Test what `inv upgrade` checks after cruft. The template's own tests run whole upgrades."""

import subprocess
from pathlib import Path

import pytest

from raymill import upgrade


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(upgrade, "PROJECT", tmp_path)
    monkeypatch.setattr(upgrade, "LINK", tmp_path / ".cruft.json")
    for words in (["init"], ["config", "user.name", "me"], ["config", "user.email", "me@localhost"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "requirements").mkdir()
    for name in ("tasks.py", "notes.md", "requirements/local.txt"):
        (tmp_path / name).write_text("one\n")
    commit(tmp_path)
    return tmp_path


def commit(project: Path) -> None:
    for words in (["add", "--all"], ["commit", "--no-gpg-sign", "--no-verify", "--quiet", "--message", "text"]):
        subprocess.run(["git", *words], cwd=project, check=True)


def test_a_project_without_a_link_is_refused(project: Path) -> None:
    with pytest.raises(SystemExit, match=r"not linked to its template\. Run, .* cruft link ADDRESS"):
        upgrade.upgrade()


def test_an_upgrade_that_could_not_be_undone_is_refused(project: Path) -> None:
    (project / ".cruft.json").write_text('{"template": "/nowhere", "commit": "1"}')
    with pytest.raises(SystemExit, match=r"uncommitted changes \(\.cruft\.json\), so an upgrade could not be undone"):
        upgrade.upgrade()
    commit(project)
    with pytest.raises(SystemExit, match="git cannot clone the template /nowhere"):
        upgrade.upgrade()


def test_conflicts_are_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upgrade._require_no_conflicts([])
    (project / "requirements" / "local.txt").write_text("<<<<<<< ours\none\n=======\ntwo\n>>>>>>> theirs\n")
    (project / "tasks.py.rej").write_text("@@ -1 +1 @@\n")
    with pytest.raises(SystemExit, match=r"conflict with yours in requirements/local\.txt, tasks\.py\.rej\. Edit"):
        upgrade._require_no_conflicts([])
    assert "git checkout --theirs requirements/local.txt" in capsys.readouterr().out


def test_changes_that_git_skipped_are_named(project: Path) -> None:
    with pytest.raises(SystemExit, match=r"could not apply all changes of the template: notes\.md: already exists"):
        upgrade._require_no_conflicts(["notes.md: already exists in working directory"])


def test_only_new_entries_of_the_changelog_are_shown() -> None:
    old = "# Changelog\n\nText.\n\n## Unreleased\n### Added\n- One,\n  in two lines.\n### Fixed\n- Two.\n"
    new = (
        "# Changelog\n\nText.\n\n## Unreleased\n### Added\n- Four.\n\n## 1.0\n### Added\n- One, in\n  two lines.\n"
        "### Fixed\n- Two.\n- Three,\n  in two lines.\n"
    )
    shown = ["## Unreleased", "### Added", "- Four.", "## 1.0", "### Fixed", "- Three,\n  in two lines."]
    assert upgrade.new_entries(old, new) == shown
    assert upgrade.new_entries(new, new) == []
    assert upgrade.new_entries("", "") == []
