"""Generates the project in which the tests of the library run. Its `raymill` is a link to the library's source."""

import atexit
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import bake

FOLDER = "RAYMILL_TEST_PROJECT"


def enter() -> None:
    """Import `raymill`, `jobs` and `tasks` from the project. All processes of one pytest command use the same project.

    The project's path has spaces, because users have folders such as "My Drive", and Ray splits paths at spaces.
    """
    if not shutil.which("uv"):  # under `./inv`, the launcher sets this variable
        os.environ.setdefault("UV", str(bake.TEMPLATE / ".cluster" / "uv" / "bin" / "uv"))
    if FOLDER not in os.environ:
        folder = bake.BUILD / "a b é" / f"tests-{os.getpid()}"
        os.environ[FOLDER] = str(make(folder))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.path.insert(0, os.environ[FOLDER])


def make(folder: Path) -> Path:
    """Generate a project whose library is a link, with this process's environment. Return `folder`."""
    bake.bake(folder)
    shutil.rmtree(folder / bake.LIBRARY.name)
    (folder / bake.LIBRARY.name).symlink_to(bake.LIBRARY)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@contextlib.contextmanager
def complete_project(name: str) -> Iterator[Path]:
    """Yield a project with its own copy of the library, because an emulated AWS copies no links to its machines."""
    folder = bake.bake(Path(f"{os.environ[FOLDER]}-{name}"))
    (folder / ".venv").symlink_to(sys.prefix)
    yield folder
    shutil.rmtree(folder)
