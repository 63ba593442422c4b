"""What tests ask of processes, which may end while they are asked."""

import contextlib
from collections.abc import Callable, Iterable
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
