"""Test which edits change the hash of a module: those of the module, and of all that it imports."""

import shutil
from pathlib import Path

import pytest

from raymill import settings
from raymill.aws import launcher_file, node_code
from raymill.common import cluster_file

WATCHDOG = "raymill/node/watchdog_head.py"
IMPORTED = ["raymill/node/spending.py", "raymill/common/prices.py", "raymill/settings.py", "raymill/instance_types.py"]
IN_A_FUNCTION = "raymill/ray_support/private/core.py"
ELSEWHERE = ["raymill/training/trainer.py", "raymill/aws/target.py", "raymill/planner/plan.py", "tasks.py"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the project's code, and let the hash be that of the copy."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(settings.PROJECT / "raymill", tmp_path / "raymill", ignore=skipped)
    for file in settings.PROJECT.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(node_code, "ON_NODES", tmp_path / "raymill" / "node")
    monkeypatch.setattr(launcher_file, "AT_START", tmp_path / "raymill" / "serving")
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    return tmp_path


def edit(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")


@pytest.mark.parametrize("name", [WATCHDOG, *IMPORTED, IN_A_FUNCTION])
def test_an_edit_of_what_nodes_run_outside_of_jobs_changes_its_hash(name: str, project: Path) -> None:
    before = node_code.digest()
    assert node_code.digest() == before
    edit(project / name)
    assert node_code.digest() != before


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_edit_elsewhere_does_not(name: str, project: Path) -> None:
    before = node_code.digest(), launcher_file.resolved(cluster_file.load()).digest
    edit(project / name)
    assert (node_code.digest(), launcher_file.resolved(cluster_file.load()).digest) == before


def test_an_edit_of_the_watchdog_does_not_set_up_the_head_again(project: Path) -> None:
    before = launcher_file.resolved(cluster_file.load()).digest
    edit(project / WATCHDOG)
    assert launcher_file.resolved(cluster_file.load()).digest == before


@pytest.mark.parametrize("name", ["haproxy.py", "haproxy.sh", "haproxy_defaults.cfg", "haproxy_frontend.cfg"])
def test_an_edit_of_what_ray_starts_with_does(name: str, project: Path) -> None:
    before = launcher_file.resolved(cluster_file.load()).digest
    edit(project / "raymill" / "serving" / name)
    assert launcher_file.resolved(cluster_file.load()).digest != before


def test_a_new_file_on_the_nodes_changes_the_hash(project: Path) -> None:
    before = node_code.digest()
    (project / "raymill" / "node" / "new.py").touch()
    assert node_code.digest() != before
