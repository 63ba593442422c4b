"""Run a fine-tuning job on a fake GPU, to see whether it fits into the memory of a real one. Costs nothing.

The job runs for two steps, with the nodes' packages and with tensors of the real shapes, but without real weights.
`inv plan` estimates the same memory with formulas, for every method at once.
"""

import contextlib
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invoke import Exit
from rich.console import Console

from raymill import environment, job_scripts, sections, settings
from raymill.common import cluster_file, gpu_types
from raymill.errors import UserError
from raymill.fake_gpu import build
from raymill.instance_types import InstanceType
from raymill.job_context import JobContext

GIB = 2**30
UNMODELED_GIB = 1
"""Memory of a real GPU that torch's allocator does not manage: CUDA's context and NCCL's buffers. Not measured yet on a
real GPU."""

COMPLETE = "packages-are-complete"
"""Name of a file in the nodes' environment. It exists after a complete installation."""

RECORD_FILE = settings.PROJECT / "results" / "fit.json"
SWITCHES = (["--gradient-checkpointing"], ["--micro-batch-rows", "1"], ["--lora-rank", "16"])
"""Options that save memory, in the order in which they are tried."""


@dataclass(frozen=True)
class Measured:
    """What one rank of a job needs. Sizes are in bytes. `failed` names the part that ran out of GPU memory, if any."""

    world_size: int
    micro_batch_rows: int
    allocated: int
    reserved: int
    main_memory: int
    """Only blocks of 32 MiB or more count."""
    failed: str = ""


def fit(job: str, options: list[str], console: Console) -> None:
    """Print what a job needs on a GPU of the cluster, and the largest micro-batch that fits.

    Raises:
        UserError: this is not a fine-tuning job, or this machine cannot run a fake GPU.
        Exit: the job does not fit, or it ended with an error, which it has printed.
    """
    if job not in job_scripts.fine_tuning():
        raise UserError(f"fit cannot measure {job}. Run: inv fit {' | '.join(job_scripts.fine_tuning())}")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise UserError(
            f"fit needs Linux on x86-64, because it uses the packages of the nodes. Use: {settings.inv('plan MODEL')}"
        )
    gpu = Gpu(nodes_environment(), _instance())
    with console.status(f"{job} runs on a fake {gpu.instance.gpu}"):
        needed = gpu.run(job, options)
    result = f"{job} on {needed.world_size} × {gpu.instance.gpu} {_result(needed, gpu)}"
    console.print(result, soft_wrap=True)
    _save(job, options, result)
    if needed.failed:
        _try_switches(gpu, job, options, console)
        raise Exit(code=1)
    with console.status("searching for the largest micro-batch that fits"):
        rows = _largest_micro_batch(gpu, job, options, needed.micro_batch_rows)
    console.print(f"largest micro-batch that fits: --micro-batch-rows {rows}", soft_wrap=True)


def last_result(job: str, options: list[str]) -> str:
    """Return what `inv fit` last printed for a job with these options and the current settings.toml, and when.

    If `inv fit` has not measured exactly these settings, return a sentence that says so.
    """
    record = _records().get(job)
    if not record or record["settings"] != _settings(job, options):
        command = shlex.join(["inv", "fit", job, *(["--", *options] if options else [])])
        return f"inv fit has not measured {job} with these settings. To check the memory first, run: {command}"
    return f"inv fit, on {record['at']}: {record['result']}"


def _instance() -> InstanceType:
    """Return the cluster's preferred instance type for training."""
    return gpu_types.for_training(cluster_file.load())[0]


def _records() -> dict[str, dict[str, Any]]:
    """Return the last result of each job. An unreadable file counts as empty: a killed `inv fit` may leave one."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(RECORD_FILE.read_text())
    return {}


def _save(job: str, options: list[str], result: str) -> None:
    record = {"at": time.strftime("%Y-%m-%d %H:%M"), "result": result, "settings": _settings(job, options)}
    RECORD_FILE.parent.mkdir(exist_ok=True)
    RECORD_FILE.write_text(json.dumps(_records() | {job: record}, indent=2) + "\n")


def _settings(job: str, options: list[str]) -> list[Any]:
    """Return what the result depends on: the options, the GPUs, sections of settings.toml, and the code in jobs/."""
    document = tomllib.loads(settings.FILE.read_text(encoding="utf-8"))
    names = [name for entry in sections.declared_in(job) for name in entry.names] + ["preprocess"]
    tables = [[tables.get(name) for name in names] for tables in (document, document.get("cluster", {}))]
    scripts = sorted((settings.PROJECT / "jobs").rglob("*.py"))
    code = hashlib.sha256(b"".join(script.read_bytes() for script in scripts)).hexdigest()
    return [options, _instance().name, *tables, code]


def _result(needed: Measured, gpu: "Gpu") -> str:
    if needed.failed:
        return f"does not fit: {needed.failed} runs out of memory"
    main_memory = f"; each rank takes {needed.main_memory / GIB:.1f} GiB of main memory" if needed.main_memory else ""
    return (
        f"fits: it allocates {needed.allocated / GIB:.1f} GiB of {gpu.mib / 1024:.0f} GiB, and reserves "
        f"{needed.reserved / GIB:.1f} GiB{main_memory}"
    )


@dataclass(frozen=True)
class Gpu:
    """A fake GPU."""

    environment: Path
    """The environment with the packages of the nodes."""
    instance: InstanceType
    """The instance type that it stands for."""

    @property
    def mib(self) -> int:
        """Memory for torch's allocator."""
        return self.instance.gpu.mib - UNMODELED_GIB * 1024

    def run(self, job: str, options: list[str]) -> Measured:
        """Run two steps of a job.

        Raises:
            Exit: the job ended with an error, which it has printed.
        """
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            done = self._run(job, options, report, quiet=False)
            if done.returncode or not report.exists():
                raise Exit(code=done.returncode or 1)
            return Measured(**json.loads(report.read_text()))

    def fits(self, job: str, options: list[str]) -> bool:
        """Return whether a job fits. A job that ends with an error counts as not fitting."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            done = self._run(job, options, report, quiet=True)
            return not done.returncode and "failed" not in json.loads(report.read_text())

    def _run(self, job: str, options: list[str], report: Path, *, quiet: bool) -> "subprocess.CompletedProcess[bytes]":
        rank = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(self.instance.gpus)}
        rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        variables = self.variables(self.mib) | rank
        variables |= JobContext(profile="cluster", fit_report=str(report)).variables()
        command = [str(self.python), "-m", f"jobs.{job}", *options]
        output = subprocess.DEVNULL if quiet else None
        return subprocess.run(command, cwd=settings.PROJECT, env=variables, stdout=output, stderr=output)

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    def variables(self, mib: int) -> dict[str, str]:
        """Return the environment variables of a process that sees the GPU with `mib` MiB of memory."""
        folder = build.for_environment(self.environment)
        return os.environ | build.variables(folder, self.instance.gpu, mib=mib)


def _try_switches(gpu: Gpu, job: str, options: list[str], console: Console) -> None:
    for switch in SWITCHES:
        with console.status(f"trying {' '.join(switch)}"):
            fits = gpu.fits(job, [*options, *switch])
        console.print(f"with {' '.join(switch)}: {'fits' if fits else 'does not fit'}")


def _largest_micro_batch(gpu: Gpu, job: str, options: list[str], rows: int) -> int:
    """Double `rows` while the job still fits and the rows divide the global batch. Return the largest such number."""
    while gpu.fits(job, [*options, "--micro-batch-rows", str(2 * rows)]):
        rows *= 2
    return rows


def nodes_environment() -> Path:
    """Return the environment with the packages of the nodes. The first call installs it."""
    pins = cluster_file.PINS
    folder = environment.VENV.resolve().parent / f"cuda-{environment.hash_of(pins)[:12]}"
    if not (folder / COMPLETE).exists():
        print(f"installing the packages of the nodes in {folder} (about 10 GB)", file=sys.stderr, flush=True)
        environment.install(folder, pins, "--quiet", cuda=True)
        (folder / COMPLETE).touch()
    return folder
