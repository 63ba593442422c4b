"""A copy of this project with a job of its own, whose verbs run in separate processes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import requests

import settings

NOT_COPIED = (".venv", ".cluster", ".env", ".git", "data", "models", "runs", "results")  # at the top: see pipeline/data


class Project:
    """A copy of this project, whose verbs run in separate processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = [str(folder / ".venv" / "bin" / "python"), "-m", "invoke"]

    def inv(self, *words: str, ok: bool = True) -> str:
        """Return stdout and stderr of a verb. Asserts that it succeeds, or fails if not `ok`."""
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
    """Copy this project to `folder`, with the environment of these tests and the script `probe` as job "probe"."""
    shutil.copytree(
        settings.PROJECT, folder, ignore=lambda path, _: NOT_COPIED if Path(path) == settings.PROJECT else ()
    )
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "jobs" / "probe.py").write_text(probe)
    return Project(folder)


def processes(project: Project) -> list[psutil.Process]:
    """Return the head that `up` started, and all its descendants."""
    head = psutil.Process(project.state["session"])
    return [head, *head.children(recursive=True)]


def read_until(client: subprocess.Popen, word: str) -> str:
    """Wait until a line of the log starts with `word`. Return the id of the job."""
    assert client.stdout is not None
    job_id = ""
    for line in client.stdout:
        if line.startswith("submitted "):
            job_id = line.split()[1]
        if line.startswith(word):
            return job_id
    raise AssertionError(f"the log ended without {word!r}")
