"""Test the notebook on the head, with a stub of uv that serves a page instead of JupyterLab."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from raymill import settings

# Answers on the socket as JupyterLab does, and records what other processes and its parent's user could see.
UV = f"""\
#!{sys.executable}
import os, sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer

home = Path.home()
(home / "pid").write_text(str(os.getpid()))
(home / "arguments").write_text(" ".join(sys.argv))
(home / "token").write_text(os.environ["JUPYTER_TOKEN"])
if (home / "broken").exists():
    sys.exit("no such package")
class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def address_string(self):
        return "socket"
path = next(word.partition("=")[2] for word in sys.argv if word.startswith("--ServerApp.sock="))
UnixStreamServer(path, Page).serve_forever()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    uv = tmp_path / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV)
    uv.chmod(0o755)
    return tmp_path


@contextlib.contextmanager
def started(home: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the module with its pipes. In the end, kill it and the stub, whatever the test found."""
    command = [sys.executable, "-m", "raymill.node.notebook", str(home / "socket")]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=settings.PROJECT, env=os.environ | {"HOME": str(home)}, text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            os.kill(int((home / "pid").read_text()), signal.SIGKILL)


def test_a_notebook_ends_with_its_connection_and_its_token_is_in_no_command_line(home: Path) -> None:
    with started(home) as process:
        assert process.stdout
        assert process.stdin
        token = process.stdout.readline().strip()
        assert token == (home / "token").read_text()
        assert len(token) > 30
        assert token not in (home / "arguments").read_text()
        assert "--ServerApp.sock_mode=0600" in (home / "arguments").read_text()
        jupyter = int((home / "pid").read_text())
        assert psutil.pid_exists(jupyter)
        process.stdin.close()
        assert process.wait(60) == 0
    assert not psutil.pid_exists(jupyter)
    assert not (home / "socket").exists()


def test_a_notebook_that_cannot_start_says_why(home: Path) -> None:
    (home / "broken").touch()
    with started(home) as process:
        assert process.wait(60) == 1
        assert process.stderr
        assert process.stderr.read() == "JupyterLab has ended: no such package\n"


def test_without_uv_the_error_says_how_to_get_it(home: Path) -> None:
    (home / ".local" / "bin" / "uv").unlink()
    command = [sys.executable, "-m", "raymill.node.notebook", str(home / "socket")]
    done = subprocess.run(
        command, cwd=settings.PROJECT, env={"HOME": str(home), "PATH": str(home)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("the head has no uv. Run in inv ssh")
