"""Test that `inv rehearse` runs a cluster on an emulated AWS from start to finish, and leaves nothing."""

import subprocess
import sys

import pytest

from raymill import settings
from raymill.emulator import sandbox


@pytest.mark.slow
@pytest.mark.skipif(bool(sandbox.unsupported_reason()), reason=sandbox.unsupported_reason() or "supported")
def test_a_cluster_on_the_emulated_aws_leaves_nothing() -> None:
    command = [sys.executable, "-m", "invoke", "rehearse"]
    done = subprocess.run(command, cwd=settings.PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no process, mount or network is left" in done.stdout
