"""Test the project's environment: the sources of its packages, its location, cleanup and installation."""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from raymill import environment


@pytest.fixture(autouse=True)
def no_settings_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_FIND_LINKS", "UV_TORCH_BACKEND", "UV_INDEX_STRATEGY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def wheels(tmp_path: Path) -> str:
    (tmp_path / "torch-2.0.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    return str(tmp_path)


def test_torch_comes_from_find_links_that_have_it(wheels: str) -> None:
    source, variables = environment.package_sources({"find-links": f"{wheels} https://wheels.example/page"})
    assert variables == {"UV_FIND_LINKS": f"{wheels},https://wheels.example/page"}
    assert wheels in source


def test_torch_comes_from_the_cpu_index_if_find_links_lack_it(tmp_path: Path) -> None:
    source, variables = environment.package_sources({"find-links": str(tmp_path)})
    assert variables["UV_FIND_LINKS"] == str(tmp_path)
    assert source == ("PyTorch's CPU index" if sys.platform == "linux" else "the package index")


@pytest.mark.skipif(sys.platform != "linux", reason="PyPI's torch for macOS is already a CPU build")
def test_torch_comes_from_the_cpu_index_and_the_rest_from_a_mirror() -> None:
    source, variables = environment.package_sources({"index-url": "https://mirror.example/simple"})
    assert variables == {"UV_DEFAULT_INDEX": "https://mirror.example/simple", "UV_TORCH_BACKEND": "cpu"}
    assert source == "PyTorch's CPU index"


def test_settings_of_uv_override_those_of_pip(monkeypatch: pytest.MonkeyPatch, wheels: str) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", wheels)
    source, variables = environment.package_sources({"find-links": "/somewhere/else"})
    assert variables == {}
    assert wheels in source


def test_settings_of_pip_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://mirror.example/simple\nfind-links = /files\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/environment")
    settings = environment.pip_settings()
    if not settings:
        pytest.skip("pip is not on PATH, so it has no settings")
    assert settings["index-url"] == "https://mirror.example/simple"
    assert settings["find-links"] == "/environment", "pip's environment variables must override its files"


@pytest.fixture
def venv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a project's `.venv`, a link to an environment. Make os.execv raise SystemExit with the command."""
    environment_folder = tmp_path / "cache" / "mine"
    (environment_folder / "bin").mkdir(parents=True)
    link = tmp_path / "pro ject" / ".venv"
    link.parent.mkdir()
    link.symlink_to(environment_folder)
    monkeypatch.setattr(environment, "VENV", link)
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def become(program: Path | str, arguments: list[str]) -> None:
        raise SystemExit(f"{program} {' '.join(arguments[1:])}")

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(sys, "argv", ["inv", "up"])
    return link


def test_the_resolved_python_runs_the_verb(venv: Path) -> None:
    (venv / environment.STAMP).write_text("\n".join(environment._hashes()))
    with pytest.raises(SystemExit, match=f"^{venv.resolve()}/bin/python -m invoke up$"):
        environment.enter()
    assert os.environ["VIRTUAL_ENV"] == str(venv.resolve())


@pytest.mark.parametrize("own", [False, True])
def test_the_cache_is_in_the_project_if_its_environment_is(
    monkeypatch: pytest.MonkeyPatch, venv: Path, own: bool
) -> None:
    os.environ.pop("XDG_CACHE_HOME", None)
    if own:  # the launcher creates the environment in this folder if the user's cache is read-only
        target = venv.parent / ".cluster" / "cache" / "mine"
        target.parent.mkdir(parents=True)
        venv.readlink().rename(target)
        venv.unlink()
        venv.symlink_to(target)
        monkeypatch.setattr(environment, "PROJECT", venv.parent)
    monkeypatch.setattr(environment, "_is_current", lambda folder: True)
    with pytest.raises(SystemExit, match=r"-m invoke up$"):
        environment.enter()
    assert os.environ.get("XDG_CACHE_HOME") == (str(venv.parent / ".cluster" / "cache") if own else None)


@pytest.mark.parametrize("old", ["link", "folder"])
def test_after_a_change_of_pins_the_launcher_creates_the_environment_again(venv: Path, old: str) -> None:
    (venv / environment.STAMP).write_text("other pins")
    if old == "folder":
        target = venv.readlink()
        venv.unlink()
        target.rename(venv)
    with pytest.raises(SystemExit, match=f"^{environment.LAUNCHER} up$"):
        environment.enter()
    assert not os.path.lexists(venv), "if .venv remained, the launcher would consider the environment complete"


def test_environments_without_a_project_are_removed(tmp_path: Path) -> None:
    environments = tmp_path / "cache"
    for name in ("used", "moved away", "uses another", "unmounted/away"):
        folder = environments / Path(name).name
        folder.mkdir(parents=True)
        (folder / environment.OWNERS).write_text(f"{tmp_path / 'gone too'}\n{tmp_path / name}\n")
    (environments / "python").mkdir()
    for name, target in (("used", "used"), ("uses another", "used")):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".venv").symlink_to(environments / target)
    environment._remove_abandoned(environments)
    assert {path.name for path in environments.iterdir()} == {"used", "python", "away"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create another user's folder")
def test_another_users_environment_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "cache" / "theirs"
    theirs.mkdir(parents=True)
    (theirs / environment.OWNERS).write_text(str(tmp_path / "gone"))
    os.chown(theirs, 65534, 65534)
    environment._remove_abandoned(tmp_path / "cache")
    assert theirs.is_dir()


INSTALL = """
import sys, time
from pathlib import Path
from raymill import environment

sys.prefix = sys.argv[1]

def sync(folder, pins, *options):
    with Path(sys.argv[2]).open("a") as log:
        print(*options, file=log)
    time.sleep(float(sys.argv[3]))

environment._sync = sync
environment.install_pins()
"""


def start_install(folder: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    """Start a process that pretends to install into `folder` for `seconds`, and logs uv's options as one line."""
    return subprocess.Popen(
        [sys.executable, "-c", INSTALL, str(folder), str(log), str(seconds)],
        cwd=environment.PROJECT,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def test_two_verbs_at_once_install_only_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "environment", tmp_path / "log"
    folder.mkdir()
    first = start_install(folder, log, 3)
    wait_for(log)
    second = start_install(folder, log, 0)
    assert "waiting for another ./inv" in second.communicate()[1]
    assert first.wait() == second.returncode == 0
    assert len(log.read_text().splitlines()) == 1
    assert not (folder / environment.INSTALLING).exists()


def test_an_installation_that_was_killed_is_repeated_from_the_start(tmp_path: Path) -> None:
    folder, log = tmp_path / "environment", tmp_path / "log"
    folder.mkdir()
    killed = start_install(folder, log, 60)
    wait_for(log)
    killed.kill()
    killed.communicate()
    assert start_install(folder, log, 0).wait() == 0
    assert [("--reinstall" in line) for line in log.read_text().splitlines()] == [False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="DeepSpeed, which needs the headers, runs only on Linux")
def test_missing_headers_give_a_one_sentence_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match=r"^error: .* has no Python\.h, .* Run: sudo apt-get install python3\.11-dev$"):
        environment.install_pins()
