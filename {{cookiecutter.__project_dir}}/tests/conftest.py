"""Shared fixtures: a tiny model with its training data, and Ray on this machine."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read by `import ray`; keeps Ray on loopback
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # without it, workers would get another environment under `uv run`
os.environ["HF_HUB_OFFLINE"] = "1"

from raymill.demo import assets as demo_assets


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `data/pairs.jsonl` and an untrained model in `model/`."""
    folder = tmp_path_factory.mktemp("assets")
    demo_assets.write_data(folder / "data")
    demo_assets.write_model(folder / "model")
    return folder


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start one Ray instance, with its own folder, for all tests that need one."""
    import ray

    from raymill.ray_support.private import core

    folder = tempfile.mkdtemp(prefix="ray-test-")  # short, because a socket path may have at most 107 bytes
    core.init(folder, address="local", num_cpus=4, object_store_memory=512 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
