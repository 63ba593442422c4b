"""Runs JupyterLab on the head, in the cluster's environment, until the connection of `inv notebook` ends.

JupyterLab listens on a socket that only this user can open, and asks for a new token. The token is never in a command
line, which other processes could read. uv puts JupyterLab into an environment on top of ~/env, so ~/env stays as it is.
"""

import contextlib
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

JUPYTERLAB = "jupyterlab==4.6.6"
PINS = Path("requirements/cluster.txt")
FOLDER = Path.home() / "notebooks"
LOG = Path.home() / "notebook.log"
START_TIMEOUT_S = 300


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


def run(path: Path) -> None:
    """Start JupyterLab, print its token when it answers, and end it when stdin is closed."""
    token = secrets.token_urlsafe(32)
    process = _start(path, token)
    try:
        _wait_until_ready(process, path)
        print(token, flush=True)
        sys.stdin.read()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # its kernels are in sessions of their own, and it ends them
        process.wait()
        path.unlink(missing_ok=True)


def _start(path: Path, token: str) -> subprocess.Popen[bytes]:
    uv = shutil.which("uv", path=f"{Path.home() / '.local' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if not uv:
        sys.exit("the head has no uv. Run in inv ssh --target aws: curl -LsSf https://astral.sh/uv/install.sh | sh")
    FOLDER.mkdir(exist_ok=True)
    options = [f"--ServerApp.sock={path}", "--ServerApp.sock_mode=0600", f"--ServerApp.root_dir={FOLDER}"]
    jupyter = ["jupyter", "lab", "--no-browser", "--log-level=ERROR", *options]
    with LOG.open("wb") as log:
        return subprocess.Popen(
            [uv, "run", "--quiet", "--no-project", "--python", sys.executable, "--with", JUPYTERLAB, *jupyter],
            env=os.environ | {"JUPYTER_TOKEN": token, "UV_CONSTRAINT": str(PINS.resolve())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_until_ready(process: subprocess.Popen[bytes], path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"JupyterLab has ended: {LOG.read_text(errors='replace').strip()[-500:]}")
        connection = _SocketConnection(path)
        try:
            connection.request("GET", "/api")
            connection.getresponse().read()
            return
        except OSError:
            time.sleep(0.5)
        finally:
            connection.close()
    sys.exit(f"JupyterLab does not answer after {START_TIMEOUT_S} s")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
