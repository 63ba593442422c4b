"""The template's own verbs: ./inv VERB. The verbs of a generated project are in its own tasks.py."""

import ast
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from invoke import Context, Exit, task
from packaging.markers import Marker

import bake
from faults import catalog

TEMPLATE = shlex.quote(str(bake.TEMPLATE))
BUILD = bake.TEMPLATE / "build"
PYTHON = shlex.quote(sys.executable)
UV = shlex.quote(os.environ.get("UV", "uv"))  # set by `inv`
# Ray itself splits paths at spaces, and people keep projects in folders such as "My Drive"
TEST_PROJECT = "a b é/test"
# a release that is a week old is on every mirror, and a bad one has been withdrawn by then
COMMON = "--python-version 3.11 --exclude-newer P7D --no-annotate"


@task
def demo(context: Context) -> None:
    """Make a project with the default answers in build/demo and run its whole pipeline."""
    project = _bake(context, "demo")
    _step(f"running that project's own demo in {project}")
    _become(project, "demo")


@task
def test(context: Context) -> None:
    """Run every test: the template's, then those of a project that it makes, in a folder whose path has a space."""
    lint(context)
    _install_programs(context)
    _step("testing the template")
    context.run(f"{PYTHON} -m pytest")
    project = _bake(context, TEST_PROJECT)
    python = _python(context, project)
    _step(f"testing the emulated AWS of {project}")
    # confcutdir: tests/conftest.py needs the template's environment
    options = f"-c {TEMPLATE}/pyproject.toml --confcutdir {TEMPLATE}/tests/emulator {TEMPLATE}/tests/emulator"
    with context.cd(str(project)):
        context.run(f"{shlex.quote(str(python))} -m pytest {options}", env=_variables(project), in_stream=False)
    _step(f"running that project's own tests in {project}")
    _become(project, "test")


@task
def rehearse(context: Context) -> None:
    """Make a project with the default answers in build/rehearsal and rehearse its life on AWS, on this machine."""
    project = _bake(context, "rehearsal")
    _step(f"running that project's own rehearsal in {project}")
    _become(project, "rehearse")


@task(help={"only": "one part by its name, as benchmarks/__main__.py lists them; all when left out"})
def bench(context: Context, only: str = "") -> None:
    """Measure a fresh project in build/bench against what people would use otherwise; writes benchmarks/README.md."""
    project = _bake(context, "bench")
    variables = {"PROFILE": "local", "HF_HUB_OFFLINE": "1"}
    _become_module(_python(context, project), project, "benchmarks", only, **variables)


@task(help={"only": "faults whose names contain one of these comma-separated words", "list": "only list the names"})
def faults(context: Context, only: str = "", list_: bool = False) -> None:
    """Inject faults into an emulated AWS, and check how a cluster handles each. Needs root; all take an hour."""
    try:
        chosen = catalog.choose(only)
    except ValueError as error:
        raise Exit(f"error: {error}", 1) from None
    if list_:
        print("\n".join(f"{fault.name}: {fault.expected}" for fault in chosen))
        return
    project = _bake(context, "faults")
    _become_module(_python(context, project), project, "faults", only)


@task
def bench_up(context: Context) -> None:
    """Compare `inv up` with plain `ray up`, in an emulated AWS. Needs root."""
    project = _bake(context, "bench-up")
    _become_module(_python(context, project), project, "benchmarks.bench_up")


@task
def lint(context: Context) -> None:
    """Check the Python files and the GitHub workflows of the template and of the project, as they stand."""
    _step("checking style")
    # no cache: it would be baked into the next project; RUF200: a pyproject.toml with Jinja is not TOML yet
    context.run(f"{PYTHON} -m ruff check --no-cache --ignore RUF200 .")
    context.run(f"{PYTHON} -m ruff format --no-cache --check .")
    _step("checking GitHub workflows")
    folders = (bake.TEMPLATE / ".github", bake.PROJECT / ".github")
    workflows = [shlex.quote(str(file)) for folder in folders for file in sorted(folder.glob("workflows/*.yml"))]
    context.run(f"{PYTHON} -m check_jsonschema -q --builtin-schema vendor.github-workflows {' '.join(workflows)}")
    zizmor = shlex.quote(str(Path(sys.executable).with_name("zizmor")))  # a program, no module
    context.run(f"{zizmor} --quiet --offline {' '.join(workflows)}")


@task
def lock(context: Context) -> None:
    """Compile the project's requirements/*.in to the pins that it installs; versions stand in cookiecutter.json."""
    project = _bake(context, "lock")
    _step("compiling local.txt: CPU, Linux and macOS")
    plain = {name: value for name, value in os.environ.items() if name not in ("UV_FIND_LINKS", "UV_TORCH_BACKEND")}
    cpu = os.environ if "UV_FIND_LINKS" in os.environ else plain | {"UV_TORCH_BACKEND": "cpu"}
    _compile(context, project, "local", "--universal --override requirements/local.overrides.txt", cpu)
    _step("compiling cluster.txt: CUDA, Linux")
    _compile(context, project, "cluster", "--python-platform x86_64-manylinux_2_28", plain)


def _install_programs(context: Context) -> None:
    """Some tests need Debian packages; without root or apt they are skipped, with the reason."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    needed = _rehearsal_programs() | {"chromium": "chromium"}  # in which the page of a served model is tried
    missing = [package for program, package in needed.items() if not shutil.which(program, path=path)]
    if not missing or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    _step(f"installing {' '.join(missing)} for the tests")
    quiet: dict[str, Any] = {"hide": "out", "env": {"DEBIAN_FRONTEND": "noninteractive"}}
    context.run("apt-get update -qq", **quiet)
    context.run(f"apt-get install --yes -qq --no-install-recommends {' '.join(missing)}", **quiet)
    if "openssh-server" in missing and shutil.which("systemctl"):
        # only the program is needed; nobody should log in here
        context.run("systemctl disable --now ssh.service ssh.socket", hide=True, warn=True)


def _rehearsal_programs() -> dict[str, str]:
    """The project's own list, read and not imported: what it imports is not installed here."""
    module = ast.parse((bake.PROJECT / "cluster" / "emulator" / "sandbox.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.targets[0]): node.value for node in module.body if isinstance(node, ast.Assign)}
    return ast.literal_eval(assigned["PROGRAMS"])


def _bake(context: Context, name: str) -> Path:
    """A fresh project in build/NAME. A cluster that an earlier one left running is ended first."""
    project = BUILD / name
    for target in ("local", "rehearsal"):
        if (project / ".cluster" / f"{target}.json").exists():
            _step(f"ending the {target} cluster of {project}")
            _verb(context, project, f"down --target {target}")
    _step(f"making a project in {project}")
    return bake.bake(project)


def _verb(context: Context, project: Path, verb: str) -> None:
    """Run a verb of the project, as people do; invoke ends with its exit code when it fails."""
    context.run(f"{shlex.quote(str(project / 'inv'))} {verb}", pty=sys.stdout.isatty(), in_stream=False)


def _become(project: Path, verb: str) -> None:
    """Replace this process with a verb of the project, so that signals and kills reach it."""
    sys.stdout.flush()
    os.execv(project / "inv", [str(project / "inv"), verb])


def _python(context: Context, project: Path) -> Path:
    """Create the project's environment, and return its Python. Resolved: through the link, Ray would find a space."""
    _step(f"making the environment of {project}")
    _verb(context, project, "--list")  # any verb creates it
    return (project / ".venv").resolve() / "bin" / "python"


def _variables(project: Path) -> dict[str, str]:
    """Return the variables with which the template's modules run in a project's environment."""
    return {
        "PYTHONPATH": f"{project}{os.pathsep}{bake.TEMPLATE}",
        "PATH": f"{(project / '.venv').resolve() / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # below `uv run`, workers would get another environment
    }


def _become_module(python: Path, project: Path, module: str, *arguments: str, **variables: str) -> None:
    """Replace this process with a module of the template, in the project's environment and folder."""
    sys.stdout.flush()
    os.chdir(project)
    os.execve(python, [str(python), "-m", module, *arguments], os.environ | _variables(project) | variables)


def _compile(context: Context, project: Path, name: str, options: str, variables: Mapping[str, str]) -> None:
    """Compile one pin file in the project's folder, where its relative paths hold, and take it over."""
    pins = Path("requirements") / f"{name}.txt"
    with context.cd(str(project)):
        context.run(
            f"{UV} pip compile -q {COMMON} {options} requirements/{name}.in -o {pins}",
            env=dict(variables),
            replace_env=True,
        )
    lines = (project / pins).read_text(encoding="utf-8").splitlines()
    machines = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]["environments"]
    text = "".join(f"{_without_needless_marker(line, machines)}\n" for line in lines)
    (bake.PROJECT / pins).write_text(text, encoding="utf-8")


def _without_needless_marker(line: str, machines: list[str]) -> str:
    """A pin without its marker where that holds on all `machines`, themselves markers: uv repeats them on each line."""
    package, _, marker = line.partition(" ; ")
    values = [dict(re.findall(r"(\w+) == '([^']+)'", machine)) for machine in machines]
    return package if marker and all(Marker(marker).evaluate(machine) for machine in values) else line


def _step(title: str) -> None:
    print(f"==> {title}", flush=True)
