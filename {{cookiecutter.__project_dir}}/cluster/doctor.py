"""`inv doctor`: what can be known before anything is started, each line with its remedy. It changes nothing."""

import importlib.metadata
import platform
import re
import shutil
import socket
import stat
import sys
from collections.abc import Iterator

import psutil
from rich.console import Console
from rich.markup import escape

import settings
from cluster.submission import SecretsSection
from cluster.target import Finding

DEMO_MEMORY_GIB = 8
FREE_DISK_GIB = 5
MARKS = {"ok": "[green]✓[/]", "note": "[yellow]![/]", "wrong": "[bold red]✗[/]"}


def local() -> list[Finding]:
    """Everything that the `local` target needs."""
    return [
        finding
        for check in (_versions, _platform, _compiler, _room, _env_file, _settings, _port)
        for finding in check()
    ]


def show(findings: list[Finding], console: Console) -> bool:
    """Print the report; returns whether nothing is wrong."""
    for finding in findings:
        console.print(f"{MARKS[finding.verdict]} {escape(finding.text)}", highlight=False)
    return all(finding.verdict != "wrong" for finding in findings)


def _versions() -> Iterator[Finding]:
    """What is installed against the pins: a half-synced environment shows here and not in mid-job."""
    pins = (settings.PROJECT / "requirements" / "local.txt").read_text(encoding="utf-8")
    for name in ("ray", "torch", "transformers"):
        pinned = re.search(rf"^{name}(?:\[[\w,-]+\])?==([\w.]+)", pins, re.MULTILINE)
        installed = importlib.metadata.version(name).partition("+")[0]
        if pinned and pinned[1] != installed:
            yield Finding(
                "wrong", f"{name} {installed} is installed and {pinned[1]} is pinned; run: rm -r .venv && inv doctor"
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
            "note", f"{system}: all but serve_llm and finetune_deepspeed runs here; use Linux x86_64 for those"
        )


def _compiler() -> Iterator[Finding]:
    if shutil.which("g++"):
        yield Finding("ok", "g++ is there: DeepSpeed compiles its CPU operator with it")
    else:
        yield Finding(
            "wrong", "g++ is missing and finetune_deepspeed needs it; run: apt-get install g++ (or your system's way)"
        )


def _room() -> Iterator[Finding]:
    memory = psutil.virtual_memory().available / 2**30
    disk = shutil.disk_usage(settings.PROJECT).free / 2**30
    yield Finding(
        "ok" if memory >= DEMO_MEMORY_GIB else "note",
        f"{memory:.0f} GiB of memory free; the demo takes up to {DEMO_MEMORY_GIB}",
    )
    yield Finding(
        "ok" if disk >= FREE_DISK_GIB else "note", f"{disk:.0f} GiB of disk free; {FREE_DISK_GIB} is comfortable"
    )


def _env_file() -> Iterator[Finding]:
    file = settings.PROJECT / ".env"
    if not file.exists():
        yield Finding("ok", ".env is not there yet: inv up makes it")
    elif stat.S_IMODE(file.stat().st_mode) & 0o077:
        yield Finding("wrong", ".env can be read by others and holds secrets; run: chmod 600 .env")
    else:
        yield Finding("ok", ".env is yours alone")


def _settings() -> Iterator[Finding]:
    """The jobs' sections of both profiles, typed as the jobs read them."""
    from pipeline.data.options import PreprocessOptions
    from pipeline.evaluation.options import EvaluateOptions
    from pipeline.generation.options import GenerateOptions
    from pipeline.rag.options import EmbedOptions, RagOptions
    from pipeline.serving.accelerator import check_accelerator
    from pipeline.serving.options import ServeOptions
    from pipeline.training.options import ClassifierOptions, DDPOptions, DeepSpeedOptions, FSDPOptions
    from pipeline.tuning.options import TuneOptions

    sections: list[tuple[type[settings.Section], tuple[str, ...]]] = [
        (PreprocessOptions, ("preprocess",)),
        (DDPOptions, ("train",)),
        (FSDPOptions, ("train", "fsdp")),
        (DeepSpeedOptions, ("train", "deepspeed")),
        (TuneOptions, ("train", "tune")),
        (ClassifierOptions, ("train", "classifier")),
        (EvaluateOptions, ("evaluate",)),
        (ServeOptions, ("serve",)),
        (EmbedOptions, ("embed",)),
        (RagOptions, ("rag",)),
        (GenerateOptions, ("generate",)),
        (SecretsSection, ("secrets",)),
    ]
    for profile in settings.PROFILES:
        try:
            for section_type, names in sections:
                settings.load(section_type, *names, profile=profile)
            check_accelerator(settings.load(ServeOptions, "serve", profile=profile).accelerator)
        except settings.UserError as refusal:
            yield Finding("wrong", f"in profile {profile}: {refusal}")
            return
    yield Finding("ok", "settings.toml is sound in both profiles")


def _port() -> Iterator[Finding]:
    from pipeline.serving.options import ServeOptions

    try:
        options = settings.load(ServeOptions, "serve", profile="local")
    except settings.UserError:
        return  # said already
    with socket.socket() as probe:
        taken = probe.connect_ex((options.host, options.port)) == 0
    if taken:
        yield Finding(
            "note", f"port {options.port} is in use; if not by your own model, set [serve] port in settings.toml"
        )
    else:
        yield Finding("ok", f"port {options.port} is free for serve_llm")
