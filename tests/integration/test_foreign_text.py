"""Test that names, documents, errors and logs of others reach a terminal without their control characters."""

import ast
import datetime
import io
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretend_api
import pytest
from dependencies import FILES, OF_JOBS, is_in

from raymill import job_output, keys, settings, status, submission, usage
from raymill.clients import chat
from raymill.console import Console, cell
from raymill.data import files, preview
from raymill.data.files import InputFile, InputFiles
from raymill.generation import generation
from raymill.printable import LOG, printable
from raymill.serving import served_models
from raymill.status import Snapshot
from raymill.target import CloudStatus, Copy, PastJob, PastLog
from raymill.training import report

# clear the screen, set the window's title and ring, an 8-bit CSI, reverse the direction, hide text, overwrite a line,
# begin a line, half a surrogate pair, and Rich's markup
EVIL = "\x1b[2J\x1b]0;title\x07a\x9b1mb\u202ec\x1b[8md\re\nerror: f\ud83d[bold]g[/nothing]"
SEEN = r"\x1b[2J\x1b]0;title\x07a\x9b1mb\u202ec\x1b[8md\re\nerror: f\ud83d[bold]g[/nothing]"
OBEYED = re.compile("[^\n\t\\x20-\\x7e\\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")
SGR = re.compile(r"\x1b\[[0-9;]*m")
NOW = datetime.datetime.now(datetime.UTC)


def is_safe(text: str) -> bool:
    """Return whether a terminal shows the whole text, whose own colors have been removed."""
    return not OBEYED.search(text)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=2000, color_system=None)


def test_each_control_character_becomes_an_escape_and_other_text_stays() -> None:
    assert printable(EVIL) == SEEN
    controls = [chr(code) for code in range(0x110000) if OBEYED.match(chr(code))]
    assert all(is_safe(printable(control)) for control in controls)
    assert printable("\n\t\r", LOG) == "\n\t\r"
    normal = "aÄ中\u00a0\u200c\u200d\u3000👩\u200d👧 \\x1b"
    assert printable(normal) == normal


def test_only_codes_that_color_text_stay_in_a_log() -> None:
    colored = "\x1b[36m(worker)\x1b[0m \x1b[1;38;5;8mx\x1b[m\x1b[38;2;1;2;8my\n"
    assert printable(colored, LOG, colors=True) == colored
    for code in ("\x1b[8m", "\x1b[0;8m", "\x1b[5m", "\x1b[2J", "\x1b[A", "\x1b[31", "\x1b[31;8;1m"):
        assert is_safe(printable(code, LOG, colors=True))


# ---------------------------------------------------------------- verbs


def job(**changes: Any) -> dict[str, Any]:
    times = {"start_time": 1000, "end_time": 2000}
    made = {"submission_id": EVIL, "metadata": {"owner": EVIL}, "status": "FAILED", "message": EVIL, **times}
    return {**made, "driver_exit_code": None, "job_id": "1"} | changes


def past_job() -> PastJob:
    common = {"started": 0.0, "ended": 1.0, "exit_code": 1}
    return PastJob(id=EVIL, owner=EVIL, command=EVIL, state="failed", message=EVIL, **common)


def show_usage(console: Console) -> None:
    counts = {"status": 200, "prompt_tokens": 1, "completion_tokens": 1}
    line = {"time": NOW.isoformat(), "key": "alice", "model": EVIL, "route": "POST /v1/completions", **counts}
    usage.show([json.dumps(line)], NOW - datetime.timedelta(hours=1), console)


def show_keys(console: Console) -> None:
    stored = f"bob{EVIL.replace(':', '')}:sha256={'0' * 64}:models={EVIL.replace(':', '').replace('|', '')}"
    keys.show(SimpleNamespace(name=".env", read=lambda: stored), console)  # type: ignore[arg-type]


def show_status(console: Console) -> None:
    node = {"node_ip": EVIL, "is_head_node": False, "state": "DEAD", "state_message": EVIL, "resources_total": {}}
    deployment = {f"x:{EVIL}": {"replicas": [], "message": EVIL}}
    app = {"status": "DEPLOY_FAILED", "message": EVIL, "route_prefix": EVIL, "deployments": deployment}
    waiting = {"job_id": "1", "placement_group_id": "", "required_resources": {EVIL: 1.0}}
    serve = {"applications": {EVIL: app}, "http_options": {"host": EVIL, "port": 1}}
    load = {"usage": {}, "resourceDemand": [[{EVIL: 1}, 1]]}
    shown = Snapshot(nodes=[node], load=load, jobs=[job()], waiting=[waiting], serve=serve)
    status.show(shown, CloudStatus(notes=[EVIL], problems=[EVIL]), console)


def show_past_jobs(console: Console) -> None:
    status.show_past([past_job()], console)


def show_report(console: Console) -> None:
    console.print(report._table([dict.fromkeys(report.SHOWN, EVIL)]))


VERBS: list[Callable[[Console], None]] = [show_usage, show_keys, show_status, show_past_jobs, show_report]


@pytest.mark.parametrize("show", VERBS)
def test_a_table_of_a_verb_shows_foreign_text_as_it_is(show: Callable[[Console], None], console: Console) -> None:
    show(console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert is_safe(shown), show
    assert r"\x1b[2J\x1b]0" in shown
    assert "[bold]" in shown
    assert not re.search("^error: f", shown, re.MULTILINE) or show is show_report  # the runs are the user's own


def test_a_console_keeps_its_own_colors() -> None:
    colored = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    colored.print(f"[red]{cell(EVIL)}[/] {cell('x')}")
    shown = colored.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[31m" in shown
    assert is_safe(SGR.sub("", shown))
    assert SEEN in SGR.sub("", shown)


def test_no_verb_makes_another_kind_of_console() -> None:
    for path in [path for name, path in FILES.items() if is_in(name, "raymill") and not is_in(name, *OF_JOBS)]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        sources = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert "Console" not in calls or "rich.console.Console" not in sources, path


@pytest.mark.parametrize("copied", [True, False])
def test_a_past_log_is_printed_safely(copied: bool, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Copy(f"\x1b[36m(worker)\x1b[0m {EVIL}\n", NOW)
    submission.print_past(PastLog(past_job(), copy if copied else None))
    printed = capsys.readouterr()
    assert is_safe(SGR.sub("", printed.out).replace("\r", ""))
    assert is_safe(printed.err)
    assert ("\x1b[36m(worker)\x1b[0m \\x1b[2J" in printed.out) == copied


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_log_is_printed_safely_wherever_a_chunk_ends(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"one {EVIL} two\n"
    with job_output.Printer(verbose=True) as printer:
        for first in range(0, len(text), size):
            printer.write(text[first : first + size])
    printed = capsys.readouterr().out
    assert is_safe(printed.replace("\r", ""))
    assert r"\x1b[8md" in printed


def test_a_chat_prints_answers_errors_and_names_safely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretend_api, "MODELS", ("small", EVIL.replace("\ud83d", "")))
    typed = iter(["/model", "/model absent", "hello", "too long", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    with pretend_api.running(tmp_path) as api:
        api.chunks = [EVIL.replace("\ud83d", ""), "\x1b", "[2J"]
        chat.chat(api.url, {})
    printed = capsys.readouterr().out
    assert is_safe(printed)
    assert printed.count(r"\x1b]0;title") == 3


# ---------------------------------------------------------------- jobs


def source(folder: Path, *names: str) -> InputFiles:
    found = [InputFile(f"{folder}/{name}", 1, 0) for name in names]
    return InputFiles(f"{folder}", None, f"{folder}", found)  # type: ignore[arg-type]


def show_other_files(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("{}")
    (folder / EVIL.replace("/", "").replace("\ud83d", "")).write_text("x")
    files.find(str(folder), (".jsonl", ".parquet"), "embed")


def show_test_split(folder: Path) -> None:
    files.check_splits(source(folder, f"test-{EVIL}.jsonl".replace("/", "")))


def show_rows(folder: Path) -> None:
    row = {"problem": EVIL, "row": EVIL.replace("\ud83d", "").encode() + b"\xff"}
    head = SimpleNamespace(unused=[EVIL], formats=[EVIL], rows=[row])
    preview._show_rows(head, SimpleNamespace(name=EVIL))  # type: ignore[arg-type]


def show_bad_rows(folder: Path) -> None:
    output = SimpleNamespace(count_rejected=lambda: Counter({EVIL: 2}), uri="out")
    generation.print_summary(output)  # type: ignore[arg-type]


def show_models(folder: Path) -> None:
    app = {"models": [EVIL], "percent": 100, "requests": 1, "errors": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_models.routing_state, "actor", lambda: SimpleNamespace(apps=SimpleNamespace(remote=dict)))
        patch.setattr(served_models.ray, "get", lambda _: {"/": app})
        served_models.show()


JOBS: list[Callable[[Path], None]] = [show_other_files, show_test_split, show_rows, show_bad_rows, show_models]


@pytest.mark.parametrize("show", JOBS)
def test_a_job_prints_names_and_rows_on_one_line(
    show: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(tmp_path)
    printed = capsys.readouterr().out
    assert is_safe(printed)
    assert r"\x1b[2J" in printed
    assert not re.search("^error: f", printed, re.MULTILINE)


JOB = """
import sys
from raymill import settings
from raymill.errors import UserError
from raymill.job import run

def main(_):
    print(sys.argv[1], file=sys.stdout)
    print("\\x1b[32mgreen\\x1b[0m", flush=True)
    raise UserError(sys.argv[1])

run(main, None)
"""


def test_what_a_job_prints_is_safe_without_any_care() -> None:
    """Also if a job was started without `inv`, and prints a text as it came."""
    evil = EVIL.replace("\ud83d", "")
    command = [sys.executable, "-c", JOB, evil]
    done = subprocess.run(command, cwd=settings.PROJECT, capture_output=True, encoding="utf-8")
    assert done.returncode == 1
    assert is_safe(SGR.sub("", done.stdout).replace("\r", ""))
    assert "\x1b[32mgreen\x1b[0m" in done.stdout
    assert done.stderr.strip() == f"error: {printable(evil)}"


def test_an_error_of_a_verb_is_one_line() -> None:
    command = [sys.executable, "-m", "invoke", "plan", "\x1b[2Jno\nerror: such"]
    done = subprocess.run(command, cwd=settings.PROJECT, capture_output=True, encoding="utf-8")
    assert (done.returncode, is_safe(done.stderr)) == (1, True)
    assert len(done.stderr.strip().splitlines()) == 1
