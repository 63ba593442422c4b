"""Copies this project, adds a job, and runs the verbs of the copy in separate processes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import requests

from raymill import settings
from raymill.environment import OWNERS

# Skipped only at the top level. For example, raymill/data is copied.
NOT_COPIED = (".venv", ".cluster", ".env", ".git", "data", "models", "runs", "results")


class Project:
    """A copy of this project. Its verbs run in separate processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = [str(folder / "inv")]
        self.python = str((folder / ".venv").resolve() / "bin" / "python")  # Ray splits the link's path at spaces

    def inv(self, *words: str, ok: bool = True) -> str:
        """Run a verb that must succeed, or fail if `ok` is False. Return its stdout and stderr."""
        done = subprocess.run([*self.command, *words], cwd=self.folder, capture_output=True, text=True, timeout=180)
        printed = done.stdout + done.stderr
        assert (done.returncode == 0) == ok, printed
        assert "Traceback" not in printed, printed
        return printed

    @property
    def state(self) -> dict:
        return json.loads((self.folder / ".cluster" / "local.json").read_text())

    def get(self, path: str) -> requests.Response:
        token = (self.folder / ".cluster" / "token").read_text()
        return requests.get(self.state["dashboard"] + path, headers={"Authorization": f"Bearer {token}"}, timeout=15)


def copy_project(folder: Path, probe: str) -> Project:
    """Copy this project to `folder`, with the environment of these tests. Add the script `probe` as job "probe"."""
    shutil.copytree(
        settings.PROJECT, folder, ignore=lambda path, _: NOT_COPIED if Path(path) == settings.PROJECT else ()
    )
    _link_environment(folder)
    (folder / "jobs" / "probe.py").write_text(probe)
    return Project(folder)


def _link_environment(folder: Path) -> None:
    """Give the copy the environment of these tests. The launcher only uses an environment that names its project."""
    environment = folder.with_name("environment")
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        (environment / entry.name).symlink_to(entry)
    (environment / OWNERS).unlink()
    (environment / OWNERS).write_text(str(folder))
    (folder / ".venv").symlink_to(environment)


def processes(project: Project) -> list[psutil.Process]:
    """Return the head's process, which `up` started, and all its descendants."""
    head = psutil.Process(project.state["session"])
    return [head, *head.children(recursive=True)]


def read_until(client: subprocess.Popen, word: str) -> str:
    """Wait until a line of the client's output starts with `word`. Return the job's id."""
    assert client.stdout is not None
    job_id = ""
    for line in client.stdout:
        if line.startswith("submitted "):
            job_id = line.split()[1]
        if line.startswith(word):
            return job_id
    raise AssertionError(f"the log ended without {word!r}")
