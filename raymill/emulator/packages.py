"""Download the hosts' packages into uv's cache, because hosts cannot reach the internet."""

import re
import shutil
import sys
from pathlib import Path

from raymill import environment, settings
from raymill.emulator import die_with_parent

PINS = settings.PROJECT / ".cluster" / "rehearsal-pins.txt"
VENV = settings.PROJECT / ".cluster" / "rehearsal-venv"


def fill_cache() -> Path:
    """Fill uv's cache with the packages that hosts install, and return the file with their pins.

    If uv fails, exit after uv has printed the reason.
    """
    PINS.write_text(_cpu_pins())
    with die_with_parent.start("raymill.emulator.packages") as process:
        if code := process.wait():
            sys.exit(code)
    return PINS


def _cpu_pins() -> str:
    """Return this machine's pins without vLLM's CPU build, a gigabyte that hosts do not need.

    Hosts install these instead of the pins in requirements/cluster.txt, which need CUDA.
    """
    lines = environment.PINS.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not re.search(r"\bvllm", line))


if __name__ == "__main__":
    environment.install(VENV, PINS, "--quiet")
    shutil.rmtree(VENV)
