"""Print a job's log without Ray's own messages. In a terminal, show a progress bar below the log."""

import re
import sys
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from raymill.console import Console
from raymill.printable import LOG, printable

ANSI = re.compile(r"\x1b\[[0-9;]*m")
NOISE = re.compile(
    r"[\d-]+ [\d:,]+\s+INFO job_manager\.py:\d+ -- "
    r"|Running entrypoint for job "
    r"|\(raylet[^)]*\) WARNING: \d+ PYTHON worker processes have been started "
    r"|\(autoscaler [^)]*\) Tip: "
    r"|(\([^)]*\) )?\[[\d-]+ [\d:,]+ [IWE] \d+ \d+\] core_worker\.cc:\d+: "
)
WORKER = re.compile(r"^(?:\x1b\[[0-9;]*m)*\(RayTrainWorker pid=\d+[^)]*\)(?:\x1b\[[0-9;]*m)* ")
PROGRESS = re.compile(
    r"(?P<what>.*?):? +(?P<done>[\d,]+)(?:/| of )(?P<total>[\d,]+)\b"
    r".*?(?P<left>[\d:]+(?: s| min)? left|time left unknown)"
)


def clean(line: str) -> str:
    """Return a log line without a worker's prefix, unless the worker is on another node, or "" for Ray's messages."""
    plain = ANSI.sub("", line)
    if NOISE.match(plain):
        return ""
    # keep the prefix of a worker on another node, because it shows where an error comes from. A progress line counts
    # the work of all workers, so it needs no prefix.
    is_elsewhere = ", ip=" in plain.partition(")")[0] and not PROGRESS.search(plain)
    return line if is_elsewhere else WORKER.sub("", line)


class Printer:
    """Prints a log that arrives in chunks, which may end in the middle of a line. `verbose` keeps Ray's messages."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self._rest = ""
        self._bar = _Bar() if sys.stdout.isatty() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._print(self._rest)
        if self._bar:
            self._bar.stop()

    def write(self, text: str) -> None:
        """Add a chunk, and print all complete lines."""
        self._rest += text
        while end := re.search(r"[\n\r]", self._rest):  # the job's own progress bars end their lines with \r
            line, self._rest = self._rest[: end.end()], self._rest[end.end() :]
            self._print(line)

    def _print(self, line: str) -> None:
        line = printable(line if self._verbose else clean(line), LOG, colors=True)
        if self._bar:
            self._bar.print(line)
        else:
            print(line, end="", flush=True)


class _Bar:
    """A progress bar below the log. It appears when the log first reports progress."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None

    def print(self, line: str) -> None:
        if found := PROGRESS.match(ANSI.sub("", line)):
            self._show(found)
        if self._task is None:
            print(line, end="", flush=True)
        elif line and not line.endswith("\r"):  # a progress bar of the job itself would fill the screen
            self._console.print(Text.from_ansi(line.rstrip("\r\n")), soft_wrap=True)

    def stop(self) -> None:
        if self._task is not None:
            self._progress.stop()

    def _show(self, found: re.Match[str]) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", left="")
            self._progress.start()
        done, total = (int(found[name].replace(",", "")) for name in ("done", "total"))
        what = found["what"].strip()
        self._progress.update(self._task, description=what, completed=done, total=total, left=found["left"])
