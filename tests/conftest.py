"""Shared fixtures: a copy of the template, and a project with the default answers."""

import signal
from pathlib import Path

import pytest

import bake

collect_ignore = ["emulator", "gpu_path"]  # these tests need a project's environment: see tasks.py

# a shell may start these tests with both signals ignored, and child processes would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the template without the files that git ignores. Tests must not change it."""
    return bake.snapshot(tmp_path_factory.mktemp("snapshot") / "template")


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with the default answers. Tests must not change it."""
    return bake.bake(tmp_path_factory.mktemp("default") / "project")
