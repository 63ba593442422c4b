"""What the tests share: the template as git holds it, and one project with the default answers."""

import signal
from pathlib import Path

import pytest

import bake

collect_ignore = ["emulator"]  # these tests need a project's environment: see `test` in tasks.py

# a shell ignores both in what it starts in the background, and processes that the tests interrupt would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the template without what git ignores."""
    return bake.snapshot(tmp_path_factory.mktemp("snapshot") / "template")


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project made with the default answers; not to be changed."""
    return bake.bake(tmp_path_factory.mktemp("default") / "project")
