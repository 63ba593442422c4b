"""Download the hosts' packages into uv's cache, outside the cloud, because the hosts have no network."""

import re
import shutil
import sys
from pathlib import Path

import settings
from cluster import environment
from cluster.emulator import owner

PINS = settings.PROJECT / ".cluster" / "rehearsal-pins.txt"
VENV = settings.PROJECT / ".cluster" / "rehearsal-venv"


def fill_cache() -> Path:
    """Fill uv's cache with the packages that the hosts install, and return their pins.

    If uv fails, exit; uv has printed the reason.
    """
    PINS.write_text(_cpu_pins())
    with owner.start("cluster.emulator.packages") as filling:
        if code := filling.wait():
            sys.exit(code)
    return PINS


def _cpu_pins() -> str:
    """Return this machine's pins without vLLM's CPU build, a gigabyte that no host needs.

    They stand in for requirements/cluster.txt, whose CUDA packages need a network and a GPU.
    """
    lines = environment.PINS.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not re.search(r"\bvllm", line))


if __name__ == "__main__":
    environment.install(VENV, PINS, "--quiet")
    shutil.rmtree(VENV)
