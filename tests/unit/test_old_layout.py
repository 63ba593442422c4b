"""Test that each verb names what an upgrade from the old layout left behind, until it is gone."""

from pathlib import Path
from types import ModuleType

import pytest

from raymill import old_layout, settings

FILES = {
    "pipeline/data/rows.py": "pipeline/data/rows.py is now raymill/data/rows.py: move your changes there, and delete",
    "cluster/chat.py": "cluster/chat.py is now raymill/clients/chat.py: move your changes there",
    "cluster/node/mine.py": "cluster/node/mine.py is in a folder of the old layout: move it to raymill/node/mine.py "
    "if you need it, and else delete it",
    "tests/unit/test_packing.py": "tests/unit/test_packing.py is in a folder of the library's tests, which are gone: "
    "move it to tests/ if it is yours, and else delete it",
    "settings.py": "settings.py is now raymill/settings.py: move your changes there",
    "demo/play.py": "demo/play.py is now raymill/demo/play.py: move your changes there",
}
IMPORTS = {
    "import settings": "jobs/mine.py line 1 imports settings, which is now raymill.settings",
    "from pipeline.data import rows": "imports pipeline.data, which is now raymill.data",
    "    from cluster.chat import chat": "imports cluster.chat, which is now raymill.clients.chat",
    "from pipeline import state_files": "imports pipeline, which is now raymill",
    "from pipeline.serving import canary, keys": "which is now raymill.serving, with canary in raymill.serving.r",
    "from pipeline.training.strategies import DDP": "which is now raymill.training.strategy",
    "from pipeline.ray_support import cli": "imports cli, which is gone: make a Job and end with JOB.run(main), as ",
    "from raymill.ray_support import capacity, cli": "line 1 imports cli, which is gone: make a Job",
    "import pipeline.ray_support.cli as cli": "line 1 imports cli, which is gone: make a Job",
    "import demo.play": "imports demo.play, which is now raymill.demo.play",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with the library, and with a cluster file and a job that are in order."""
    (tmp_path / "raymill").symlink_to(settings.PROJECT / "raymill")
    for name, text in (
        ("cluster/cluster.yaml", ""),
        ("jobs/good.py", "from raymill import settings\nimport demography\n"),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    return tmp_path


def test_a_project_in_the_new_layout_gets_no_note(project: Path) -> None:
    assert list(old_layout.notes()) == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_old_layout_is_named_with_its_new_place(project: Path, name: str) -> None:
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).touch()
    (note,) = old_layout.notes()
    assert note.startswith(FILES[name])


@pytest.mark.parametrize("line", IMPORTS)
@pytest.mark.parametrize("file", ["jobs/mine.py", "tasks.py"])
def test_an_import_of_an_old_module_is_named_with_its_new_name(project: Path, file: str, line: str) -> None:
    (project / file).write_text(f"{line}\n")
    (note,) = old_layout.notes()
    assert IMPORTS[line].replace("jobs/mine.py", file) in note
    assert note.startswith(f"{file} line 1 ")


def test_each_verb_prints_the_notes(
    project: Path, tasks: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "tasks.py").write_text("import settings\n")
    monkeypatch.setattr("sys.argv", ["inv", "--list"])
    tasks.start("tasks")
    assert capsys.readouterr().err == (
        "note: tasks.py line 1 imports settings, which is now raymill.settings\n"
        "note: you will see these notes until you have made these changes. Then run: inv test\n"
    )


def test_every_renamed_module_exists() -> None:
    for name in old_layout.RENAMED.values():
        assert (settings.PROJECT / f"{name.replace('.', '/')}.py").is_file(), name
