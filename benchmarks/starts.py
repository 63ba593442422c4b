"""Measures where the time of the demo goes: each process with its start, its imports and its CPU time.

Draws a timeline of the processes, benchmarks/starts.png.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.report import FOLDER, Result
from raymill import settings
from raymill.errors import UserError

PICTURE, HOOK = FOLDER / "starts.png", FOLDER / "starts_hook.py"
MARK = "STARTS_FOLDER"
INTERVAL_S = 0.2  # CPU time after the last sample of a process does not count
SHOWN_S = 1.5  # processes with less CPU time are not in the picture


@dataclass
class Process:
    """A process. Times are seconds since the start of the measurement."""

    name: str
    start: float
    end: float = 0.0
    cpu: float = 0.0
    busy: list[tuple[float, float]] = field(default_factory=list)
    """The time and the CPU seconds of each interval."""
    imports: list[tuple[float, float, float]] = field(default_factory=list)
    """The end, the wall time and the CPU time of each import."""

    @property
    def import_cpu(self) -> float:
        return sum(cpu for _, _, cpu in self.imports)


def measure() -> Result:
    """Run the demo, and watch all its processes."""
    if sys.platform != "linux":
        raise UserError("only Linux tells the environment variables of other processes. Run this part on Linux")
    with tempfile.TemporaryDirectory() as folder, _hooked(), _watched(folder) as processes:
        started = time.monotonic()
        _inv(folder, "demo")
        wall = time.monotonic() - started
        _inv(folder, "down")
    seconds = json.loads((settings.PROJECT / "results" / "demo.json").read_text(encoding="utf-8"))["seconds"]
    total = sum(process.cpu for process in processes)
    imports = sum(process.import_cpu for process in processes)
    _draw(processes, seconds)
    return {
        "bars": [],
        "rounds": _by_kind(processes),
        "steps": seconds,
        "wall_s": wall,
        "cpu_s": total,
        "import_cpu_s": imports,
    }


def _inv(folder: str, verb: str) -> None:
    subprocess.run(
        [str(settings.PROJECT / "inv"), verb], cwd=settings.PROJECT, env=os.environ | {MARK: folder}, check=True
    )


@contextmanager
def _hooked() -> Iterator[None]:
    """Let each new Python process of this environment that has MARK run starts_hook.py."""
    link = Path(sysconfig.get_path("purelib"), "starts.pth")
    link.write_text(f"import os; {MARK!r} in os.environ and exec(open({str(HOOK)!r}).read(), {{}})\n")
    try:
        yield
    finally:
        link.unlink()


@contextmanager
def _watched(folder: str) -> Iterator[list[Process]]:
    """Watch all processes that have MARK. The list is complete at the end."""
    found: dict[tuple[int, float], Process] = {}
    processes: list[Process] = []
    begun, done = time.time(), threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL_S):
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    _sample(process, found, begun, folder)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield processes
    finally:
        done.set()
        watcher.join()
        for (pid, _), process in found.items():
            lines = Path(folder, f"{pid}.jsonl")
            if lines.exists():
                made = map(json.loads, lines.read_text().splitlines())
                process.imports = [(one["end"] - begun, one["wall"], one["cpu"]) for one in made]
        processes += sorted(found.values(), key=lambda process: process.start)


def _sample(process: psutil.Process, found: dict[tuple[int, float], Process], begun: float, folder: str) -> None:
    key, now = (process.pid, process.create_time()), time.time() - begun
    if key not in found:
        if process.environ().get(MARK) != folder:
            return
        found[key] = Process("", process.create_time() - begun)
    known, times = found[key], process.cpu_times()
    known.name = _name(process.cmdline()) or known.name
    known.busy.append((now, times.user + times.system - known.cpu))
    known.cpu, known.end = times.user + times.system, now


def _name(words: list[str]) -> str:
    """Return a short name for a process: what Ray or vLLM call it, or its program or module."""
    if not words:
        return ""
    title = words[0].split(" ")[0]
    if "::" in title:
        return title
    if " -m " in words[0]:  # the title of a job that is a fork
        words = words[0].split()
    names = [word for word in words if not word.startswith("-")]
    if Path(words[0]).name.startswith("python") and "-m" in words:
        names = words[words.index("-m") + 1 :]
    elif Path(words[0]).name.startswith("python"):
        names = names[1:] or names
    return " ".join(Path(name).name for name in names[: 2 if names[:1] == ["invoke"] else 1])


def _by_kind(processes: list[Process]) -> list[dict[str, Any]]:
    """Return a table of the processes by name, those with the most CPU time first."""
    kinds: dict[str, list[Process]] = {}
    for process in processes:
        kinds.setdefault(process.name, []).append(process)
    rows = [
        {
            "process": name,
            "number": len(same),
            "CPU s": sum(one.cpu for one in same),
            "of it imports": sum(one.import_cpu for one in same),
        }
        for name, same in kinds.items()
    ]
    return sorted((row for row in rows if row["CPU s"] >= SHOWN_S), key=lambda row: -row["CPU s"])


def _draw(processes: list[Process], seconds: dict[str, float]) -> None:
    shown = [process for process in processes if process.cpu >= SHOWN_S]
    figure = Figure(figsize=(14, 1 + 0.22 * len(shown)))
    axes = figure.subplots()
    for row, process in enumerate(shown):
        axes.barh(row, process.end - process.start, left=process.start, height=0.8, color="#eeeeee")
        for end, cpu in process.busy:
            share = min(1.0, cpu / INTERVAL_S)
            axes.barh(row, INTERVAL_S, left=end - INTERVAL_S, height=0.8 * share, color="#4477aa")
        for end, wall, _ in process.imports:
            axes.barh(row + 0.4, wall, left=end - wall, height=0.15, color="#ee6677")
        label = f" {process.name}: {process.cpu:.0f} s of CPU, {process.import_cpu:.0f} s imports"
        axes.text(process.end, row, label, va="center", fontsize=7)
    at = 0.0
    for name, took in seconds.items():
        axes.axvline(at, color="#999999", linewidth=0.5)
        axes.text(at, -1.2, name, fontsize=6, rotation=20)
        at += took
    axes.set(xlabel="seconds", yticks=[], title="The processes of the demo: blue is CPU time, red lines are imports")
    axes.invert_yaxis()
    figure.savefig(PICTURE, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    harness.main(measure)
