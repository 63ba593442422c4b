"""Helpers that inspect processes, check what other users can access, and run a server."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import uvicorn

T = TypeVar("T")
WITHOUT_RECORD = (
    "import pathlib; from raymill.aws import identity; identity.FOLDER = pathlib.Path('/nonexistent'); "
    "from invoke.main import program; program.run()"
)


def verb_command(*words: str) -> list[str]:
    """Return the command of a verb that works with any account, also if this project has a cluster."""
    return [sys.executable, "-c", WITHOUT_RECORD, *words]


def read_all(processes: Iterable[psutil.Process], read: Callable[[psutil.Process], T]) -> list[T]:
    """Return the result of `read` for each process, except those that have ended or are zombies."""
    answers = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            answers.append(read(process))
    return answers


def children() -> dict[int, str]:
    """Return the names of this process's descendants, keyed by pid."""
    return dict(read_all(psutil.Process().children(recursive=True), lambda process: (process.pid, process.name())))


def open_to_others(folder: Path) -> list[str]:
    """Return the paths at and below `folder` that user `nobody` can read or write. Needs root."""
    below = (Path(root) / name for root, folders, files in os.walk(folder) for name in (*folders, *files))
    lines = "".join(f"{path}\n" for path in (folder, *below))
    script = 'while IFS= read -r path; do { [ -r "$path" ] || [ -w "$path" ]; } && echo "$path"; done; true'
    nobody = {"user": "nobody", "group": 65534, "extra_groups": []}
    done = subprocess.run(["sh", "-c", script], input=lines, capture_output=True, text=True, check=True, **nobody)
    return done.stdout.splitlines()


@contextlib.contextmanager
def in_background(server: uvicorn.Server) -> Iterator[None]:
    """Run a server in a thread of this process."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield
    server.should_exit = True
    thread.join()
