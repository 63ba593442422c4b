"""Helpers to inspect processes, which may end meanwhile, and to check what other users can access."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")


def told_by(processes: Iterable[psutil.Process], read: Callable[[psutil.Process], T]) -> list[T]:
    """What `read` gives of each process, without those that are gone or are zombies by then."""
    answers = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            answers.append(read(process))
    return answers


def children() -> dict[int, str]:
    """The pid and the name of each process below this one."""
    return dict(told_by(psutil.Process().children(recursive=True), lambda process: (process.pid, process.name())))


def open_to_others(folder: Path) -> list[str]:
    """Return the paths at and below `folder` that user `nobody` can read or write. Needs root."""
    below = (Path(root) / name for root, folders, files in os.walk(folder) for name in (*folders, *files))
    lines = "".join(f"{path}\n" for path in (folder, *below))
    script = 'while IFS= read -r path; do { [ -r "$path" ] || [ -w "$path" ]; } && echo "$path"; done; true'
    nobody = {"user": "nobody", "group": 65534, "extra_groups": []}
    done = subprocess.run(["sh", "-c", script], input=lines, capture_output=True, text=True, check=True, **nobody)
    return done.stdout.splitlines()
