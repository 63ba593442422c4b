"""Find the line that explains why a head died. Search the head's output and the logs of its Ray session."""

import re
from pathlib import Path

SESSION_LOGS = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err", "dashboard.log", "dashboard_agent.log")
COLOR = re.compile(r"\x1b\[[0-9;]*m")
EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+", re.MULTILINE)  # the last line of a traceback
FATAL = re.compile(r"^\[[^]]* [CF] \d+ \d+\] .*?\.cc:\d+: *(.+)", re.MULTILINE)  # a fatal line of Ray's C++ log
ENDED = re.compile(r"END (\w+)\.\w+ tail \(exit code\(s\)=(.+?)\) -")
MAX_CHARACTERS = 300


def find(output: Path, session: Path) -> str:
    """Return the line that explains why the head died. `output` is a file, and `session` is a folder of Ray's logs."""
    text = _read(output)
    for pattern, log in (
        (EXCEPTION, text),
        (FATAL, text + "".join(_read(session / name) for name in SESSION_LOGS)),
        (ENDED, text),
        (re.compile(r"^.*\S.*$", re.MULTILINE), text),
    ):
        if found := list(pattern.finditer(log)):
            groups = found[-1].groups() or (found[-1].group(),)
            return " ended with ".join(groups).strip()[:MAX_CHARACTERS]
    return "no output"


def _read(file: Path) -> str:
    return COLOR.sub("", file.read_text(errors="replace")) if file.is_file() else ""
