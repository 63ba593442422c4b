"""Fixtures of the tests on fake GPUs, which `./inv check-gpu-path` runs.

Code that needs CUDA runs in new processes, on fake GPUs and with the packages of the nodes.
"""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from published_models import MODELS
from transformers import PreTrainedConfig

from raymill import settings
from raymill.fake_gpu import fit
from raymill.instance_types import INSTANCE_TYPES

Run = Callable[..., str]
"""Runs Python code with the packages of the nodes on a fake A100 with `mib` MiB. Returns what the code prints."""


@pytest.fixture(scope="session")
def gpu() -> fit.Gpu:
    """Return a fake A100 with 400 GiB, enough for every job. The first call installs the packages of the nodes."""
    p4d = INSTANCE_TYPES["p4d.24xlarge"]
    return fit.Gpu(fit.nodes_environment(), replace(p4d, gpu=replace(p4d.gpu, mib=400 * 1024)))


@pytest.fixture(scope="session")
def run(gpu: fit.Gpu) -> Run:
    def run(code: str, *words: str, mib: int = 40 * 1024) -> str:
        command = [gpu.python, "-c", code, *words]
        variables = gpu.variables(mib)
        done = subprocess.run(command, cwd=settings.PROJECT, env=variables, capture_output=True, text=True)
        assert not done.returncode, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that returns a folder with a model's configuration, without weights."""
    root = tmp_path_factory.mktemp("models")

    def folder_of(name: str) -> str:
        config: PreTrainedConfig = MODELS[name]
        if not Path(root / name).exists():
            config.save_pretrained(root / name)
        return str(root / name)

    return folder_of
