"""Generate projects for the template's verbs and tests, without questions, network access or the user's defaults."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cookiecutter.main import cookiecutter

TEMPLATE = Path(__file__).resolve().parent
PROJECT = TEMPLATE / "{{cookiecutter.__project_dir}}"
LIBRARY = TEMPLATE / "raymill"
BUILD = TEMPLATE / "build"
OWNERS = "projects"  # as in raymill/environment.py, which the tests import from their own project


def snapshot(folder: Path) -> Path:
    """Copy the template to `folder`, without files that git ignores, such as `.env`. Return `folder`."""
    if not (TEMPLATE / ".git").exists():
        return shutil.copytree(
            TEMPLATE,
            folder,
            ignore=shutil.ignore_patterns("build", ".env", ".venv", ".cluster", "__pycache__", ".*_cache"),
        )
    # with safe.directory=*, git reads the checkout even if another user owns it
    listing = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=TEMPLATE, check=True, capture_output=True, text=True).stdout.split("\0"):
        if (source := TEMPLATE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def bake(folder: Path, **answers: str) -> Path:
    """Generate a project in `folder`. Keeps `.venv`, to install packages only once, and replaces the rest."""
    with tempfile.TemporaryDirectory() as scratch:
        template = snapshot(Path(scratch) / "template")
        # it would create a git repository; what else it does, this function does below
        (template / "hooks" / "post_gen_project.py").unlink()
        config = Path(scratch) / "config.yaml"  # by default, cookiecutter saves the answers in the user's home
        config.write_text(f"replay_dir: {scratch}\ncookiecutters_dir: {scratch}\n", encoding="utf-8")
        project = cookiecutter(
            str(template), no_input=True, config_file=str(config), extra_context=answers, output_dir=scratch
        )
        shutil.copytree(template / LIBRARY.name, Path(project) / LIBRARY.name)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if old.name != ".venv":
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        shutil.copytree(project, folder, dirs_exist_ok=True)
    return folder


def share_environment(project: Path) -> None:
    """Let a project use the environment of this process, which has the same packages and the template's own tools."""
    environment = Path(sys.prefix)
    (project / ".venv").unlink(missing_ok=True)
    (project / ".venv").symlink_to(environment)
    owners = environment / OWNERS
    own, *others = owners.read_text(encoding="utf-8").splitlines()
    sharing = [one for one in others if one != str(project) and Path(one).is_dir()]
    partial = owners.with_suffix(f".{os.getpid()}")  # another `inv` removes an environment whose list has no project
    partial.write_text("".join(f"{one}\n" for one in (own, *sharing, project)), encoding="utf-8")
    partial.replace(owners)
    uv, link = (folder / ".cluster" / "uv" for folder in (TEMPLATE, project))
    if uv.is_dir() and not link.exists():  # `inv` has installed uv with this environment, and only here
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(uv)


def files(project: Path) -> list[str]:
    """Return the relative paths of all files of a project."""
    return sorted(str(path.relative_to(project)) for path in project.rglob("*") if path.is_file())
