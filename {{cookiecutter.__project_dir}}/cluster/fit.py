"""Rehearse a fine-tuning job on a fake GPU, to see whether it fits into the memory of a real one. Costs nothing.

The job itself runs for two steps, with the packages of the nodes, in its real shapes and without weights. `inv plan`
estimates the same from formulas, for every strategy at once.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from invoke import Exit
from rich.console import Console

import settings
from cluster import environment, job_scripts
from cluster.common import cluster_file
from cluster.fake_gpu import build

GIB = 2**30
UNMODELED_GIB = 1
"""Memory of a real GPU that torch's allocator does not manage: CUDA's context and NCCL's buffers. Not measured yet on a
real A100."""

COMPLETE = "packages-are-complete"
"""Name of a file in an environment. It says that the installation was not interrupted."""

SWITCHES = (["--gradient-checkpointing"], ["--micro-batch-rows", "1"], ["--lora-rank", "16"])
"""Options that save memory, in the order in which they are tried."""


@dataclass(frozen=True)
class Measured:
    """What one rank of a job needs, in bytes. `failed` names what did not fit, if anything."""

    world_size: int
    micro_batch_rows: int
    allocated: int
    reserved: int
    main_memory: int
    """In blocks of 32 MiB or more."""
    failed: str = ""


def fit(job: str, options: list[str], console: Console) -> None:
    """Print what a job needs on a GPU of the cluster, and the largest micro-batch that fits.

    Raises:
        settings.UserError: this is not a fine-tuning job, or this machine cannot run a fake GPU.
        Exit: the job does not fit, or an option is wrong.
    """
    if job not in job_scripts.fine_tuning():
        raise settings.UserError(f"fit cannot measure {job}. Run: inv fit {' | '.join(job_scripts.fine_tuning())}")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise settings.UserError("fit needs Linux on x86-64, because it uses the packages of the nodes. Use: inv plan")
    workers = cluster_file.load().workers
    gpu = Gpu(nodes_environment(), 80 if any("p4de" in worker.instance_type for worker in workers) else 40)
    with console.status(f"{job} runs on a fake A100 with {gpu.gib} GB"):
        needed = gpu.run(job, options)
    if needed.failed:
        console.print(
            f"{job} on {needed.world_size} GPUs with {gpu.gib} GB does not fit: {needed.failed} runs out of memory",
            soft_wrap=True,
        )
        _try_switches(gpu, job, options, console)
        raise Exit(code=1)
    console.print(
        f"{job} on {needed.world_size} GPUs with {gpu.gib} GB fits: it allocates {needed.allocated / GIB:.1f} GiB of "
        f"{gpu.gib - UNMODELED_GIB} GiB, and reserves {needed.reserved / GIB:.1f} GiB{_main_memory(needed)}",
        soft_wrap=True,
    )
    with console.status("searching for the largest micro-batch that fits"):
        rows = _largest_micro_batch(gpu, job, options, needed.micro_batch_rows)
    console.print(f"largest micro-batch that fits: --micro-batch-rows {rows}", soft_wrap=True)


def _main_memory(needed: Measured) -> str:
    if not needed.main_memory:
        return ""
    return f"; each rank takes {needed.main_memory / GIB:.1f} GiB of main memory"


@dataclass(frozen=True)
class Gpu:
    """A fake GPU."""

    environment: Path
    """The environment with the packages of the nodes."""
    gib: int

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
        """Return whether a job fits. Options that contradict each other count as not fitting."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            done = self._run(job, options, report, quiet=True)
            return not done.returncode and "failed" not in json.loads(report.read_text())

    def _run(self, job: str, options: list[str], report: Path, *, quiet: bool) -> "subprocess.CompletedProcess[bytes]":
        rank = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        variables = self.variables((self.gib - UNMODELED_GIB) * 1024) | rank
        variables |= {"PROFILE": "cluster", "FIT_REPORT": str(report)}
        command = [str(self.python), "-m", f"jobs.{job}", *options]
        output = subprocess.DEVNULL if quiet else None
        return subprocess.run(command, cwd=settings.PROJECT, env=variables, stdout=output, stderr=output)

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    def variables(self, mib: int) -> dict[str, str]:
        """Return the environment variables of a process that sees the GPU with `mib` MiB of memory."""
        return os.environ | build.variables(build.for_environment(self.environment), mib=mib)


def _try_switches(gpu: Gpu, job: str, options: list[str], console: Console) -> None:
    for switch in SWITCHES:
        with console.status(f"trying {' '.join(switch)}"):
            fits = gpu.fits(job, [*options, *switch])
        console.print(f"with {' '.join(switch)}: {'fits' if fits else 'does not fit'}")


def _largest_micro_batch(gpu: Gpu, job: str, options: list[str], rows: int) -> int:
    """Double the rows until they no longer fit, or no longer divide the global batch."""
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
