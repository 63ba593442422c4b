"""Test generated projects: their list of files is complete, all variables are replaced, and all formats are valid."""

import json
import re
import resource
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import bake
from raymill.emulator.waiting import slowdown

ANSWERS = [
    {},
    {
        "instance_type": "p4de.24xlarge",
        "aws_region": "us-west-2",
        "max_workers": "64",
        "base_model": "o-1/Llama_3.1-8B",
    },
    {"project_name": "Größe 2", "aws_region": "eu-central-1", "max_workers": "1", "base_model": "s3://models/base"},
    {"project_name": "我的模型", "aws_region": "ap-northeast-1", "base_model": "/srv/models/llama"},
    {"project_name": "हिन्दी मॉडल", "project_slug": "hindi-llm", "base_model": "./models/base"},
    {"project_name": "small", "instance_type": "g6e.xlarge", "max_workers": "3"},
    {"project_name": "large", "instance_type": "p6-b200.48xlarge"},
    {"project_name": "Yes", "project_slug": "yes"},  # YAML reads an unquoted yes as a boolean
]
# cookiecutter copies these without rendering: Python files contain no Jinja, chat templates and boards their own, and
# published scripts stay as they are
COPIED = (".py", ".js", ".jinja", ".json")


@pytest.fixture(scope="module", params=ANSWERS, ids=lambda answers: answers.get("project_name", str(len(answers))))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a project and the answers that it was generated from."""
    return bake.bake(tmp_path_factory.mktemp("made") / "project", **request.param), request.param


def test_no_variable_is_left(made: tuple[Path, dict[str, str]]) -> None:
    for name in bake.files(made[0]):
        if name.startswith(("raymill/", "docs/pictures/")):  # copied unchanged
            continue
        path = made[0] / name
        text = path.read_text(encoding="utf-8")
        assert "cookiecutter" not in text, path
        assert path.suffix in COPIED or not re.search(r"{{|{%|{#", text), path


def test_every_file_is_well_formed(made: tuple[Path, dict[str, str]]) -> None:
    readers = {".toml": tomllib.loads, ".yaml": _load_yaml, ".yml": _load_yaml, ".json": json.loads}
    read = [
        readers[path.suffix](path.read_text(encoding="utf-8")) for path in made[0].rglob("*") if path.suffix in readers
    ]
    assert all(read)


def _load_yaml(text: str) -> Any:
    """Load YAML, ignoring CloudFormation's tags such as !Ref."""

    class Loader(yaml.SafeLoader):
        pass

    def construct(loader: yaml.SafeLoader, _: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return loader.construct_scalar(node)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node)
        assert isinstance(node, yaml.MappingNode)
        return loader.construct_mapping(node)

    Loader.add_multi_constructor("!", construct)
    return yaml.load(text, Loader)


def test_the_answers_are_in_the_project_files(made: tuple[Path, dict[str, str]]) -> None:
    project, answers = made
    cluster = yaml.safe_load((project / "cluster" / "cluster.yaml").read_text(encoding="utf-8"))
    settings = tomllib.loads((project / "settings.toml").read_text(encoding="utf-8"))
    workers = cluster["available_node_types"]["gpu-spot-1"]
    stack = _load_yaml((project / "cluster" / "stack.yaml").read_text(encoding="utf-8"))
    assert isinstance(cluster["cluster_name"], str)
    assert cluster["cluster_name"] == answers.get("project_slug", cluster["cluster_name"])
    assert stack["Resources"]["Group"]["Properties"]["GroupName"] == cluster["cluster_name"]
    assert cluster["provider"]["region"] == answers.get("aws_region", "us-east-1")
    assert workers["node_config"]["InstanceType"] == answers.get("instance_type", "p4d.24xlarge")
    assert workers["max_workers"] == int(answers.get("max_workers", "2"))
    assert settings["cluster"]["train"]["model"] == answers.get("base_model", "Qwen/Qwen3-8B")


def test_the_workers_fit_on_the_instances(made: tuple[Path, dict[str, str]]) -> None:
    project, answers = made
    settings = tomllib.loads((project / "settings.toml").read_text(encoding="utf-8"))["cluster"]
    table = runpy.run_path(str(project / "raymill" / "instance_types.py"))["INSTANCE_TYPES"]
    instance = table[answers.get("instance_type", "p4d.24xlarge")]
    expected = 2 if instance.gpus == 1 else 8  # a power of two, so that the global batch splits evenly
    for section in ("train", "evaluate", "embed", "generate"):
        assert settings[section]["num_workers"] == expected
    for cpus in (settings["train"]["cpus_per_worker"], settings["embed"]["num_cpus"], settings["serve"]["num_cpus"]):
        assert cpus * instance.gpus <= instance.vcpus


def test_the_project_has_exactly_the_listed_files(project: Path) -> None:
    """After you add or remove a file, run: .venv/bin/python -m tests.template.project_files"""
    expected = (Path(__file__).parent / "project_files.txt").read_text(encoding="utf-8").split()
    assert bake.files(project) == expected


def test_the_readmes_are_short(project: Path, template: Path) -> None:
    for page, most_lines in ((template / "README.md", 120), (project / "README.md", 150)):
        text = page.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= most_lines
        assert [line for line in text.splitlines() if len(line) > 120] == []
        paragraphs = re.sub(r"^(```.*?^```|\||- |#).*?$", "", text, flags=re.MULTILINE | re.DOTALL).split("\n\n")
        assert [lines for lines in paragraphs if len(lines.strip().splitlines()) > 4] == []


def test_scripts_are_copied_unchanged(project: Path, template: Path) -> None:
    for path in (*project.rglob("*.py"), *project.rglob("*.js")):
        name = path.relative_to(project)
        source = template if name.parts[0] == bake.LIBRARY.name else template / bake.PROJECT.name
        assert path.read_bytes() == (source / name).read_bytes()


def test_baking_again_keeps_the_environment_and_nothing_else(tmp_path: Path) -> None:
    project = bake.bake(tmp_path / "project")
    for stray in (project / ".venv" / "bin" / "python", project / "runs" / "old", project / "stray.txt"):
        stray.parent.mkdir(parents=True, exist_ok=True)
        stray.touch()
    again = bake.files(bake.bake(project))
    assert ".venv/bin/python" in again
    assert not {"runs/old", "stray.txt"} & set(again)


def test_generating_a_project_takes_under_two_seconds_and_no_network(template: Path, tmp_path: Path) -> None:
    cut_off = ["unshare", "--map-root-user", "--net"]
    if not shutil.which("unshare") or subprocess.run([*cut_off, "true"], capture_output=True).returncode:
        pytest.skip("a process without network needs Linux and user namespaces")
    command = [*cut_off, sys.executable, "-m", "cookiecutter", str(template), "--no-input", "--default-config"]
    seconds = []
    for name in ("first", "second", "third"):  # the first run also compiles the modules that it imports
        (tmp_path / name).mkdir()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, cwd=tmp_path / name, env={"HOME": str(tmp_path)})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # CPU time does not depend on other load. Without a network, there is nothing else to wait for.
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 2 * slowdown(), seconds


def test_an_environment_lists_the_projects_that_share_it_but_not_those_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, here, new = (tmp_path / name for name in ("environment", "here", "new"))
    for folder in (environment, here, new):
        folder.mkdir()
    (environment / bake.OWNERS).write_text(f"/its/own/project\n/gone\n{here}\n")
    uv = tmp_path / "template" / ".cluster" / "uv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.touch()
    monkeypatch.setattr(bake, "TEMPLATE", tmp_path / "template")
    monkeypatch.setattr(sys, "prefix", str(environment))
    for _ in range(2):
        bake.share_environment(new)
        assert (new / ".cluster" / "uv" / "bin" / "uv").samefile(uv)
        assert (environment / bake.OWNERS).read_text().splitlines() == ["/its/own/project", str(here), str(new)]
    assert (new / ".venv").readlink() == environment
