"""Fixtures: a copy of the template, and a project with the default answers."""

from pathlib import Path

import pytest

import bake


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the template without the files that git ignores. Tests must not change it."""
    return bake.snapshot(tmp_path_factory.mktemp("snapshot") / "template")


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with the default answers. Tests must not change it."""
    return bake.bake(tmp_path_factory.mktemp("default") / "project")
