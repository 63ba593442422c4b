"""Test that every script in jobs/ can be imported, and explains its options without a cluster."""

import importlib
import subprocess
import sys

import pytest

from raymill import job_scripts, settings


@pytest.mark.parametrize("job", job_scripts.names())
def test_a_job_has_a_main_function(job: str) -> None:
    assert importlib.import_module(f"jobs.{job}").main.__doc__


def test_a_job_explains_its_options() -> None:
    command = [sys.executable, "-m", "jobs.finetune_ddp", "--help"]
    done = subprocess.run(command, cwd=settings.PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--learning-rate" in done.stdout
