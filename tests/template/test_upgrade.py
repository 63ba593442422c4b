"""Test that a new project is a git repository that knows its template, and that `inv upgrade` merges later changes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bake

UPGRADE = "from raymill import upgrade; upgrade.upgrade()"
OWN_SETTING = "# my own line\n"
OWN_CODE = "\n# a change inside the library, in an emergency\n"
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

    def generate(self, template: Path | str, folder: Path) -> Path:
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


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, template: Path) -> Path:
    """Return a copy of the template that is a git repository with one commit. Tests must not change it."""
    folder = tmp_path_factory.mktemp("repository")
    copy = Path(shutil.copytree(template, folder / "template"))
    home = Home(folder / "home")
    home.git("init", "--quiet", folder=copy)
    home.commit(copy, "The old version")
    return copy


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """Return a project, made by cruft, whose template now has a newer version. Tests must not change the project."""
    folder = tmp_path_factory.mktemp("old")
    template, home = Path(shutil.copytree(repository, folder / "template")), Home(folder / "home")
    text = (bake.LIBRARY / "upgrade.py").read_text(encoding="utf-8")
    cruft = next(line for line in text.splitlines() if line.startswith("CRUFT = ")).split('"')[1]
    tool = [os.environ.get("UV", "uv"), "tool", "run", "--python", sys.executable, "--from", cruft]
    done = home.run(*tool, "cruft", "create", "--no-input", template, folder=folder)
    assert done.returncode == 0, done
    files = template / bake.PROJECT.name
    _replace(files / "README.md", "## Layout", "## New layout")
    _replace(files / "settings.toml", "precision = ", "# the new version's comment\nprecision = ")
    (files / "jobs" / "new_job.py").write_text("NEW = True\n")
    (files / "jobs" / "generate.py").unlink()
    _replace(template / "raymill" / "instance_types.py", '"us-east-1"', '"us-east-9"')
    _replace(template / "CHANGELOG.md", "### Added\n", f"### Added\n{NEW_ENTRY}\n")
    home.commit(template, "The new version")
    return folder / "my-llm"


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


# ------------------------------------------------------------------------------------------ the repository


def test_every_source_of_the_template_gives_the_same_files(home: Home, repository: Path, tmp_path: Path) -> None:
    """A checkout in which tests ran, a zip file, and a repository to clone."""
    checkout = Path(shutil.copytree(repository, tmp_path / "checkout"))
    (checkout / "raymill" / "data" / "__pycache__").mkdir()
    (checkout / "raymill" / "data" / "__pycache__" / "rows.pyc").touch()
    archive = tmp_path / "template.zip"
    home.git("archive", "--prefix=template/", f"--output={archive}", "HEAD", folder=repository)
    expected = bake.files(bake.bake(tmp_path / "baked"))
    assert "raymill/verbs.py" in expected
    for number, source in enumerate((checkout, archive, f"git+file://{repository}")):
        files = bake.files(home.generate(source, tmp_path / str(number)))
        assert [name for name in files if not name.startswith((".git/", ".cruft"))] == expected


def test_a_new_project_is_a_repository_with_one_commit(home: Home, old: Path) -> None:
    """The commit contains .cruft.json, which cruft writes again afterwards, with the same content."""
    assert home.git("log", "--format=%an <%ae>", "main", folder=old) == "my-llm <my-llm@localhost>"
    assert home.git("status", "--porcelain", folder=old) == ""
    assert ".cruft.json" in home.git("ls-files", folder=old).splitlines()


def test_a_users_git_settings_do_not_change_the_first_commit(tmp_path: Path, repository: Path) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (tmp_path / "ignored").write_text("*.py\ndata\n")
    for name in ("gpg", "pre-commit", "prepare-commit-msg", "post-commit"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran; exit 1\n")
        (hooks / name).chmod(0o755)
    settings = f"""
        [user]
            name = Ada
            email = ada@example.com
            useConfigOnly = true
        [commit]
            gpgSign = true
        [gpg]
            program = {hooks}/gpg
        [core]
            hooksPath = {hooks}
            excludesFile = {tmp_path}/ignored
            safecrlf = true
            autocrlf = true
        [init]
            templateDir = {tmp_path}
            defaultBranch = trunk
    """
    home = Home(tmp_path / "user", settings)
    project = home.generate(repository, tmp_path / "out")
    assert home.notes == ""
    assert home.git("log", "--format=%an <%ae>", "main", folder=project) == "Ada <ada@example.com>"
    assert not (tmp_path / "ran").exists()
    assert set(home.git("ls-files", folder=project).splitlines()) == {*_listed_files(), ".cruft.json"}
    for private in (".env", "data/rows.jsonl", "models/m/x", "runs/r/x", "results/x", ".cluster/known_hosts"):
        (project / private).parent.mkdir(parents=True, exist_ok=True)
        (project / private).touch()
    assert home.git("-c", "core.excludesFile=", "status", "--porcelain", folder=project) == ""


def _listed_files() -> list[str]:
    return (Path(__file__).parent / "project_files.txt").read_text(encoding="utf-8").splitlines()


def test_a_project_inside_a_repository_stays_part_of_it(home: Home, tmp_path: Path, repository: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    home.git("init", "--quiet", folder=outer)
    home.variables |= {"GIT_DIR": str(outer / ".git"), "GIT_INDEX_FILE": str(outer / "index")}  # as in a hook of git
    project = home.generate(repository, outer / "projects")
    assert not (project / ".git").exists()
    assert not (outer / "index").exists()
    link = json.loads((project / ".cruft.json").read_text(encoding="utf-8"))
    assert link["template"] == str(repository)


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


def test_an_upgrade_merges_the_templates_changes_with_yours(home: Home, tmp_path: Path, old: Path) -> None:
    project = Path(shutil.copytree(old, tmp_path / "my-llm"))
    settings = project / "settings.toml"
    settings.write_text(OWN_SETTING + settings.read_text(encoding="utf-8"), encoding="utf-8")
    library = project / "raymill" / "instance_types.py"
    library.write_text(library.read_text(encoding="utf-8") + OWN_CODE, encoding="utf-8")
    home.commit(project, "My change")
    done = home.upgrade(project)
    assert done.returncode == 0, done
    assert done.stderr == ""
    assert re.search(rf"\n## \d.*\n### Added\n{NEW_ENTRY}\n$", done.stdout), done.stdout
    assert "warning: aws_region 'us-east-1' does not offer" in done.stdout
    merged = settings.read_text(encoding="utf-8")
    assert merged.startswith(OWN_SETTING)
    assert library.read_text(encoding="utf-8").endswith(OWN_CODE)
    assert '"us-east-9"' in library.read_text(encoding="utf-8")
    assert "# the new version's comment" in merged
    assert "## New layout" in (project / "README.md").read_text(encoding="utf-8")
    assert (project / "jobs" / "new_job.py").exists()
    assert not (project / "jobs" / "generate.py").exists()
    home.commit(project, "Upgrade")
    assert "has the newest version of its template" in home.upgrade(project).stdout


def test_an_upgrade_names_files_that_conflict(home: Home, tmp_path: Path, old: Path) -> None:
    project = Path(shutil.copytree(old, tmp_path / "my-llm"))
    _replace(project / "README.md", "## Layout", "## My layout")
    home.commit(project, "My change")
    done = home.upgrade(project)
    assert done.returncode == 1
    assert "error: the template's changes conflict with yours in README.md. Edit " in done.stderr
    assert "<<<<<<< " in (project / "README.md").read_text(encoding="utf-8")
    assert "# the new version's comment" in (project / "settings.toml").read_text(encoding="utf-8")
    home.git("reset", "--quiet", "--hard", folder=project)
    home.git("clean", "--quiet", "-d", "--force", folder=project)
    assert "## My layout" in (project / "README.md").read_text(encoding="utf-8")
    assert not (project / "jobs" / "new_job.py").exists()


def test_an_upgrade_that_could_not_be_undone_is_refused(home: Home, tmp_path: Path, old: Path) -> None:
    project = Path(shutil.copytree(old, tmp_path / "my-llm"))
    (project / "mine.txt").touch()
    assert "error: there are uncommitted changes (mine.txt)" in home.upgrade(project).stderr
    (project / "mine.txt").unlink()
    shutil.move(project / ".git", tmp_path / "git")
    assert "error: this folder is not in a git repository" in home.upgrade(project).stderr
    shutil.move(tmp_path / "git", project / ".git")
    link = project / ".cruft.json"
    _replace(link, json.loads(link.read_text(encoding="utf-8"))["commit"], "0" * 40)
    home.commit(project, "A commit that the template does not have")
    assert f"no longer has the commit {'0' * 9}" in home.upgrade(project).stderr
    link.unlink()
    home.commit(project, "No link")
    unlinked = home.upgrade(project)
    assert unlinked.returncode == 1
    assert "cruft link ADDRESS --checkout COMMIT" in unlinked.stderr


# ------------------------------------------------------------------------------------------ changed templates


def test_a_changed_template_is_not_recorded_and_takes_no_replay(home: Home, tmp_path: Path, repository: Path) -> None:
    template = Path(shutil.copytree(repository, tmp_path / "template"))
    (template / "CHANGELOG.md").write_text("modified")
    project = home.generate(template, tmp_path / "out")
    assert "`inv upgrade` will not work: the template has uncommitted changes" in home.notes
    assert not (project / ".cruft.json").exists()
    assert (project / ".git").exists()

    _replace(template / "cookiecutter.json", '"_torch": "', '"_torch": "9')
    command = [sys.executable, "-m", "cookiecutter", "--replay", "--default-config", str(template)]
    (tmp_path / "other").mkdir()
    done = home.run(*command, folder=tmp_path / "other")
    assert done.returncode == 1
    assert done.stderr == "error: the answers are of another version of the template (_torch). Leave out --replay\n"
    assert list((tmp_path / "other").iterdir()) == []
