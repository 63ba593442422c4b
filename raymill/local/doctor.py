"""Checks of `inv doctor` for this machine. They change nothing."""

import importlib.metadata
import platform
import re
import shutil
import socket
import stat
import sys
from collections.abc import Iterator

import psutil

from raymill import sections, settings
from raymill.doctor import Finding, judge
from raymill.errors import UserError

DEMO_MEMORY_GIB = 8
FREE_DISK_GIB = 5


def check() -> list[Finding]:
    """Check everything that the `local` target needs."""
    checks = (_versions, _platform, _compiler, _memory_and_disk, _env_file, _settings, _port)
    return [finding for check in checks for finding in check()]


def _versions() -> Iterator[Finding]:
    """Compare the installed versions with the pins. Without this check, a half-synced environment would fail later."""
    pins = (settings.PROJECT / "requirements" / "local.txt").read_text(encoding="utf-8")
    for name in ("ray", "torch", "transformers"):
        pinned = re.search(rf"^{name}(?:\[[\w,-]+\])?==([\w.]+)", pins, re.MULTILINE)
        installed = importlib.metadata.version(name).partition("+")[0]
        if pinned and pinned[1] != installed:
            yield Finding(
                "error", f"{name} {installed} is installed, but {pinned[1]} is pinned. Run: rm -r .venv && ./inv doctor"
            )
        else:
            yield Finding("ok", f"{name} {installed}, as pinned")
    yield Finding("ok", f"Python {platform.python_version()}")


def _platform() -> Iterator[Finding]:
    if sys.platform == "linux" and platform.machine() == "x86_64":
        yield Finding("ok", "Linux x86_64: every job runs here")
    else:
        system = f"{platform.system()} {platform.machine()}"
        yield Finding(
            "warning",
            f"{system}: serve_llm, generate and finetune_deepspeed need Linux x86_64. Other jobs run here",
        )


def _compiler() -> Iterator[Finding]:
    if shutil.which("g++"):
        yield Finding("ok", "g++ is installed; DeepSpeed compiles its CPU operator with it")
    else:
        yield Finding(
            "error",
            "g++ is not installed, and finetune_deepspeed needs it. "
            "Run: apt-get install g++ (or use your system's package manager)",
        )


def _memory_and_disk() -> Iterator[Finding]:
    memory = psutil.virtual_memory().available / 2**30
    disk = shutil.disk_usage(settings.PROJECT).free / 2**30
    yield Finding(
        "ok" if memory >= DEMO_MEMORY_GIB else "warning",
        f"{memory:.0f} GiB of memory free; the demo uses up to {DEMO_MEMORY_GIB}",
    )
    yield Finding(
        "ok" if disk >= FREE_DISK_GIB else "warning", f"{disk:.0f} GiB of disk free; {FREE_DISK_GIB} are recommended"
    )


def _env_file() -> Iterator[Finding]:
    file = settings.PROJECT / ".env"
    if not file.exists():
        yield Finding("ok", ".env does not exist yet; inv up creates it")
    elif stat.S_IMODE(file.stat().st_mode) & 0o077:
        yield Finding("error", ".env holds secrets, but other users can read it. Run: chmod 600 .env")
    else:
        yield Finding("ok", "only you can read .env")


def _settings() -> Iterator[Finding]:
    """Load all sections in all their profiles, into the types that the jobs and verbs use."""
    from raymill.serving.options import ServeOptions
    from raymill.serving.preflight import check_accelerator

    try:
        sections.check()
    except UserError as error:
        yield Finding("error", str(error))
        return
    for profile in settings.PROFILES:
        try:
            for entry in (one for one in sections.all_entries() if profile in one.profiles):
                settings.load(entry.load_type(), *entry.names, profile=profile)
            check_accelerator(settings.load(ServeOptions, "serve", profile=profile).accelerator)
        except UserError as error:
            yield Finding("error", f"in profile {profile}: {error}")
            return
    yield Finding("ok", "settings.toml is valid in both profiles")


def _port() -> Iterator[Finding]:
    from raymill.serving.options import ServeOptions

    try:
        options = settings.load(ServeOptions, "serve", profile="local")
    except UserError:
        return  # _settings reports this error
    with socket.socket() as probe:
        in_use = probe.connect_ex((options.host, options.port)) == 0
    yield judge(
        not in_use,
        f"port {options.port} is {'in use' if in_use else 'free for serve_llm'}",
        "Unless your own model uses it, set another port in [serve] of settings.toml",
        "warning",
    )
