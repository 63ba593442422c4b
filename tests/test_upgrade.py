"""Test that a new project is a git repository that knows its template, and that `inv upgrade` merges later changes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bake

UPGRADE = "from cluster import upgrade; upgrade.upgrade()"
OWN_SETTING = "# my own line\n"
NEW_ENTRY = "- The new version has this entry,\n  which has two lines."


class Home:
    """A user's home folder, with the variables of a shell there and a git configuration."""

    def __init__(self, folder: Path, configuration: str = "") -> None:
        self.folder = folder
        folder.mkdir()
        (folder / ".gitconfig").write_text(configuration)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "XDG_", "EMAIL"))}
        # as usual, uv's cache is in the home folder of the user who runs the tests
        cache = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
        self.variables = kept | {"HOME": str(folder), "UV_CACHE_DIR": cache, "UV_TOOL_DIR": str(folder / "tools")}

    def run(self, *words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=folder, env=self.variables, capture_output=True, text=True)

    def git(self, *words: str, folder: Path) -> str:
        done = self.run("git", *words, folder=folder)
        assert done.returncode == 0, done
        return done.stdout.strip()

    def commit(self, folder: Path, message: str) -> None:
        self.git("add", "--all", folder=folder)
        identity = ("-c", "user.name=me", "-c", "user.email=me@localhost", "-c", "commit.gpgSign=false")
        self.git(*identity, "commit", "--quiet", "--message", message, folder=folder)

    def generate(self, template: Path, folder: Path) -> Path:
        """Generate a project in `folder` with cookiecutter's command, and return the project."""
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "cookiecutter", str(template), "--no-input", "--default-config"]
        done = self.run(*command, folder=folder)
        assert done.returncode == 0, done
        self.notes = done.stdout
        return folder / "my-llm"

    def upgrade(self, project: Path) -> subprocess.CompletedProcess[str]:
        """Run the code of `inv upgrade`, which needs no packages, in the template's environment."""
        return self.run(sys.executable, "-c", UPGRADE, folder=project)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def repository(home: Home, tmp_path: Path, template: Path) -> Path:
    """Return a copy of the template that is a git repository with one commit."""
    copy = Path(shutil.copytree(template, tmp_path / "repository"))
    home.git("init", "--quiet", folder=copy)
    home.commit(copy, "The old version")
    return copy


# ------------------------------------------------------------------------------------------ the repository


@pytest.mark.parametrize("configuration", ["none", "hostile"])
def test_a_new_project_is_a_repository_with_one_commit(configuration: str, tmp_path: Path, repository: Path) -> None:
    hook = tmp_path / "hooks" / "pre-commit"
    hook.parent.mkdir()
    (tmp_path / "ignored").write_text("*.py\ndata\n")
    for name in ("pre-commit", "prepare-commit-msg", "post-commit"):
        (hook.parent / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran; exit 1\n")
        (hook.parent / name).chmod(0o755)
    hostile = f"""
        [user]
            name = Ada
            email = ada@example.com
            useConfigOnly = true
        [commit]
            gpgSign = true
        [gpg]
            program = {hook}
        [core]
            hooksPath = {hook.parent}
            excludesFile = {tmp_path}/ignored
            safecrlf = true
            autocrlf = true
        [init]
            templateDir = {tmp_path}
            defaultBranch = trunk
    """
    home = Home(tmp_path / "user", hostile if configuration == "hostile" else "")
    project = home.generate(repository, tmp_path / "out")
    assert home.notes == ""
    assert home.git("rev-list", "--count", "main", folder=project) == "1"
    author = home.git("log", "-1", "--format=%an <%ae>", folder=project)
    assert author == ("Ada <ada@example.com>" if configuration == "hostile" else "my-llm <my-llm@localhost>")
    assert not (tmp_path / "ran").exists()
    assert set(home.git("ls-files", folder=project).splitlines()) == {*_listed_files(), ".cruft.json"}
    for private in (".env", "data/rows.jsonl", "models/m/x", "runs/r/x", "results/x", ".cluster/known_hosts"):
        (project / private).parent.mkdir(parents=True, exist_ok=True)
        (project / private).touch()
    plain = ("-c", "core.excludesFile=")
    assert home.git(*plain, "status", "--porcelain", "--untracked-files=all", folder=project) == ""


def _listed_files() -> list[str]:
    return (Path(__file__).parent / "project_files.txt").read_text(encoding="utf-8").splitlines()


def test_a_project_inside_a_repository_stays_part_of_it(home: Home, tmp_path: Path, repository: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    home.git("init", "--quiet", folder=outer)
    project = home.generate(repository, outer / "projects")
    assert not (project / ".git").exists()
    assert home.git("status", "--porcelain", folder=outer) == "?? projects/"


def test_without_git_the_project_is_complete(home: Home, tmp_path: Path, repository: Path) -> None:
    home.variables["PATH"] = str(tmp_path)
    project = home.generate(repository, tmp_path / "out")
    assert home.notes.startswith("note: git is not installed")
    assert sorted(bake.files(project)) == sorted(_listed_files())


def test_git_that_fails_is_a_note(home: Home, tmp_path: Path, repository: Path) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\necho 'fatal: no space' >&2\nexit 128\n")
    (tmp_path / "git").chmod(0o755)
    home.variables["PATH"] = f"{tmp_path}{os.pathsep}{home.variables['PATH']}"
    project = home.generate(repository, tmp_path / "out")
    assert "note: the project has no git repository: fatal: no space" in home.notes
    assert not (project / ".git").exists()
    assert sorted(bake.files(project)) == sorted(_listed_files())


def test_a_generated_project_of_the_templates_verbs_is_no_repository(project: Path) -> None:
    assert not (project / ".git").exists()
    assert not (project / ".cruft.json").exists()


# ------------------------------------------------------------------------------------------ upgrades


def new_version(home: Home, repository: Path) -> None:
    """Commit a new version of the template: other texts, another file, an answer that it no longer accepts."""
    files = repository / bake.PROJECT.name
    _replace(files / "README.md", "## Layout", "## New layout")
    _replace(files / "settings.toml", "precision = ", "# the new version's comment\nprecision = ")
    (files / "jobs" / "new_job.py").write_text("NEW = True\n")
    (files / "jobs" / "generate.py").unlink()
    _replace(files / "instance_types.py", '"us-east-1"', '"us-east-9"')
    _replace(repository / "CHANGELOG.md", "### Added\n", f"### Added\n{NEW_ENTRY}\n")
    home.commit(repository, "The new version")


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_an_upgrade_merges_the_templates_changes_with_yours(home: Home, tmp_path: Path, repository: Path) -> None:
    project = home.generate(repository, tmp_path / "out")
    settings = project / "settings.toml"
    settings.write_text(OWN_SETTING + settings.read_text(encoding="utf-8"), encoding="utf-8")
    home.commit(project, "My change")
    assert "has the newest version" in home.upgrade(project).stdout

    new_version(home, repository)
    done = home.upgrade(project)
    assert done.returncode == 0, done
    assert done.stderr == ""
    assert done.stdout.endswith(f"## Unreleased\n### Added\n{NEW_ENTRY}\n"), done.stdout
    assert "warning: aws_region 'us-east-1' does not offer" in done.stdout
    merged = settings.read_text(encoding="utf-8")
    assert merged.startswith(OWN_SETTING)
    assert "# the new version's comment" in merged
    assert "## New layout" in (project / "README.md").read_text(encoding="utf-8")
    assert (project / "jobs" / "new_job.py").exists()
    assert not (project / "jobs" / "generate.py").exists()
    assert (project / ".git").is_dir()
    link = json.loads((project / ".cruft.json").read_text(encoding="utf-8"))
    assert link["commit"] == home.git("rev-parse", "HEAD", folder=repository)
    home.commit(project, "Upgrade")
    assert home.upgrade(project).returncode == 0


def test_an_upgrade_names_files_that_conflict(home: Home, tmp_path: Path, repository: Path) -> None:
    project = home.generate(repository, tmp_path / "out")
    _replace(project / "README.md", "## Layout", "## My layout")
    home.commit(project, "My change")
    new_version(home, repository)
    done = home.upgrade(project)
    assert done.returncode == 1
    assert "error: the template's changes conflict with yours in README.md. Edit " in done.stderr
    assert "<<<<<<< " in (project / "README.md").read_text(encoding="utf-8")
    assert "# the new version's comment" in (project / "settings.toml").read_text(encoding="utf-8")
    home.git("reset", "--quiet", "--hard", folder=project)
    home.git("clean", "--quiet", "-d", "--force", folder=project)
    assert "## My layout" in (project / "README.md").read_text(encoding="utf-8")
    assert not (project / "jobs" / "new_job.py").exists()


def test_an_upgrade_that_could_not_be_undone_is_refused(home: Home, tmp_path: Path, repository: Path) -> None:
    project = home.generate(repository, tmp_path / "out")
    before = home.git("rev-parse", "HEAD", folder=project)
    (project / "mine.txt").touch()
    assert "error: there are uncommitted changes (mine.txt)" in home.upgrade(project).stderr
    (project / "mine.txt").unlink()
    shutil.move(project / ".git", tmp_path / "git")
    assert "error: this folder is not in a git repository" in home.upgrade(project).stderr
    shutil.move(tmp_path / "git", project / ".git")
    (project / ".cruft.json").unlink()
    home.commit(project, "No link")
    unlinked = home.upgrade(project)
    assert unlinked.returncode == 1
    assert "cruft link ADDRESS --checkout COMMIT" in unlinked.stderr
    home.git("reset", "--quiet", "--hard", before, folder=project)
    _replace(project / ".cruft.json", home.git("rev-parse", "HEAD", folder=repository), "0" * 40)
    home.commit(project, "A commit that the template does not have")
    assert f"no longer has the commit {'0' * 9}" in home.upgrade(project).stderr


def test_a_modified_template_is_not_recorded(home: Home, tmp_path: Path, repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text("modified")
    project = home.generate(repository, tmp_path / "out")
    assert "`inv upgrade` will not work: the template has uncommitted changes" in home.notes
    assert not (project / ".cruft.json").exists()
    assert (project / ".git").exists()


def test_cruft_create_leaves_a_clean_repository(home: Home, tmp_path: Path, repository: Path) -> None:
    cruft = bake.PROJECT / "cluster" / "upgrade.py"
    pinned = next(line for line in cruft.read_text().splitlines() if line.startswith("CRUFT = ")).split('"')[1]
    command = [os.environ.get("UV", "uv"), "tool", "run", "--from", pinned, "cruft", "create", "--no-input"]
    done = home.run(*command, repository, folder=tmp_path)
    assert done.returncode == 0, done
    assert home.git("status", "--porcelain", folder=tmp_path / "my-llm") == ""


# ------------------------------------------------------------------------------------------ replays


def test_a_replay_does_not_bring_old_versions(home: Home, tmp_path: Path, repository: Path) -> None:
    home.generate(repository, tmp_path / "out")
    command = [sys.executable, "-m", "cookiecutter", "--replay", "--default-config", str(repository)]
    (tmp_path / "again").mkdir()
    assert home.run(*command, folder=tmp_path / "again").returncode == 0
    _replace(repository / "cookiecutter.json", '"_torch": "', '"_torch": "9')
    (tmp_path / "other").mkdir()
    done = home.run(*command, folder=tmp_path / "other")
    assert done.returncode == 1
    assert done.stderr == "error: the answers are of another version of the template (_torch). Leave out --replay\n"
    assert list((tmp_path / "other").iterdir()) == []
