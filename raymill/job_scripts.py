"""Find the project's jobs and check their command lines, without a cluster."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from invoke import Exit

from raymill import settings
from raymill.errors import UserError
from raymill.job_context import JobContext


def names() -> list[str]:
    """Return the names of all jobs, which are the scripts in jobs/."""
    return sorted(script.stem for script in (settings.PROJECT / "jobs").glob("*.py") if script.stem != "__init__")


def fine_tuning() -> list[str]:
    """Return the names of the jobs that fine-tune a language model: those whose script defines STRATEGY."""
    return [name for name in names() if "STRATEGY" in _assigned(find(name))]


def find(job: str) -> Path:
    """Return the path of a job's script. Raises `UserError` if there is no such job."""
    if job not in names():
        raise UserError(f"there is no job {job!r}. Run: {settings.inv('submit')} {' | '.join(names())}")
    return settings.PROJECT / "jobs" / f"{job}.py"


def check(job: str, options: list[str], profile: str) -> bool:
    """Check a job's options without running the job. Return whether to submit it.

    If the options ask for help, the job prints its help, and there is nothing to submit. A script without a `Job` is
    not checked, because the check would run it.

    Raises:
        UserError: there is no such job.
        Exit: an option is wrong; the job has printed the error.
    """
    if not _has_job(find(job)):
        return True
    checking = JobContext(profile=profile, job_options_checked_for=settings.inv(f"submit {job} --"))
    command = [sys.executable, "-m", f"jobs.{job}", *options]
    if code := subprocess.run(
        command, cwd=settings.PROJECT, env=os.environ | checking.variables(), check=False
    ).returncode:
        raise Exit(code=code)
    return not {"-h", "--help"} & set(options)


def _has_job(script: Path) -> bool:
    """Return whether the script makes a `Job`."""
    values = [value for value in _assigned(script).values() if isinstance(value, ast.Call)]
    return any(ast.unparse(value.func).rpartition(".")[2] == "Job" for value in values)


def _assigned(script: Path) -> dict[str, ast.expr | None]:
    """Return the expressions that a script assigns to its global names. A script with a syntax error assigns nothing.

    Reads the code, because importing it could take seconds.
    """
    try:
        body = ast.parse(script.read_text(encoding="utf-8")).body
    except SyntaxError:
        return {}  # running the script shows the error
    found: dict[str, ast.expr | None] = {}
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(ast.Name(id=name), value=value):
                found[name] = value
    return found
