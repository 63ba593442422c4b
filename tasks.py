"""The template's own verbs: ./inv VERB. The verbs of a generated project are in its own tasks.py."""

import ast
import base64
import hashlib
import io
import json
import os
import platform
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from invoke import Collection, Context, Exit, task
from invoke.main import program
from packaging.markers import Marker

from raymill import environment

environment.enter()  # creates .venv on first use; after this line, all packages can be imported

import bake
from faults import catalog
from raymill import command_line
from raymill.environment import TOOLS

PYTHON = shlex.quote(sys.executable)
UV = shlex.quote(os.environ.get("UV", "uv"))  # set by `inv`
# The path has spaces, because users have folders such as "My Drive", and Ray splits paths at spaces.
TEST_PROJECT = "a b é/test"
TESTS = f"{PYTHON} -m pytest"
QUICK_TESTS = ("tests/unit", "tests/template")
REHEARSAL_TEST = "tests/e2e/test_rehearsal.py"
# The rehearsal runs alone, because it takes four times as long beside other tests. The others run in three processes on
# two cores, because many wait, and in the order of their folders: the longest first.
OTHER_TESTS = ("tests/e2e", "tests/emulator", "tests/integration", "tests/template", "tests/unit")
IN_PARALLEL = f"--numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 20 --ignore {REHEARSAL_TEST}"
VLLM_ARGUMENTS = Path("raymill", "serving", "vllm_arguments.json")
THIRD_PARTY = Path("raymill", "serving", "third_party")
# P7D: only releases that are at least a week old. By then, mirrors have them, and bad ones have been withdrawn.
COMMON = "--python-version 3.11 --exclude-newer P7D --no-annotate"
CUDA = "--python-platform x86_64-manylinux_2_28"
TOOLS_HEADER = (
    "# The template's tools that a project's requirements/local.txt does not have. `./inv lock` writes this file."
)


@task
def demo(context: Context) -> None:
    """Generate a project in build/demo and run its whole pipeline."""
    project = _bake(context, "demo")
    _step(f"running the project's demo in {project}")
    _become(project, "demo")


@task(
    help={
        "all": "also run the slow tests, with the emulated AWS and a browser: 35 minutes on 2 cores",
        "nightly": "also run the slow and the nightly tests",
    }
)
def test(context: Context, all_: bool = False, nightly: bool = False) -> None:  # noqa: PT028 -- a verb, not a test
    """Check style and types, and run the quick tests of the library and the template."""
    lint(context)
    if not (all_ or nightly):
        _step("running the quick tests")
        context.run(f"{TESTS} --numprocesses 2 --dist loadfile {' '.join(QUICK_TESTS)}")
        return
    _install_programs(context)
    project = _bake(context, TEST_PROJECT)
    _step(f"running the project's tests in {project}, and the rehearsal")
    _verb(context, project, "test")
    context.run(f"{TESTS} {REHEARSAL_TEST}")
    _step("running the other tests")
    selection = "" if nightly else '-m "not nightly"'
    context.run(f"{TESTS} {IN_PARALLEL} {selection} {' '.join(OTHER_TESTS)}")


@task
def rehearse(context: Context) -> None:
    """Generate a project in build/rehearsal and run a cluster on an emulated AWS, from start to finish."""
    project = _bake(context, "rehearsal")
    _step(f"running the project's rehearsal in {project}")
    _become(project, "rehearse")


@task
def pictures(context: Context) -> None:
    """Draw the pictures of the READMEs from a demo and a rehearsal. Needs Chromium, and root for the rehearsal."""
    context.run(f"{PYTHON} -m pictures", in_stream=False)


@task(help={"only": "run only this benchmark; benchmarks/__main__.py lists the names"})
def bench(context: Context, only: str = "") -> None:
    """Compare the speed of a generated project with that of other tools. Writes the results to benchmarks/README.md."""
    project = _bake(context, "bench")
    variables = {"PROFILE": "local", "HF_HUB_OFFLINE": "1"}
    _become_module(project, "benchmarks", only, **variables)


@task(
    help={
        "only": "run only faults whose names contain one of these comma-separated words",
        "list": "list faults, but run no tests",
    }
)
def faults(context: Context, only: str = "", list_: bool = False) -> None:
    """Inject faults into a cluster on an emulated AWS, and check how it handles each. Needs root and up to an hour."""
    try:
        chosen = catalog.choose(only)
    except ValueError as error:
        raise Exit(f"error: {error}", 1) from None
    if list_:
        print("\n".join(f"{fault.name}: {fault.expected}" for fault in chosen))
        return
    project = _bake(context, "faults")
    _become_module(project, "faults", only)


@task
def bench_up(context: Context) -> None:
    """Compare the time of `ray up` inside `inv up` with that of plain `ray up`, on an emulated AWS. Needs root."""
    project = _bake(context, "bench-up")
    _become_module(project, "benchmarks.bench_up")


@task(help={"nightly": "also measure the memory of every model with every strategy, which takes hours"})
def check_gpu_path(context: Context, nightly: bool = False) -> None:
    """Train, serve and compile kernels on a fake GPU, with the nodes' CUDA packages (10 GB). Takes 15 minutes."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Exit("error: check-gpu-path needs Linux on x86-64. Run it on such a machine, or in CI", 1)
    _step("training, serving and compiling kernels on a fake GPU")
    context.run(f"{TESTS} -v tests/gpu_path" + ("" if nightly else ' -m "not nightly"'), in_stream=False)


@task
def lint(context: Context) -> None:
    """Check Python files and GitHub workflows of the template and of the project."""
    _step("checking style")
    context.run(f"{PYTHON} -m ruff check --no-cache --ignore RUF200 .")  # RUF200 rejects the Jinja in a pyproject.toml
    context.run(f"{PYTHON} -m ruff format --no-cache --check .")
    _step("checking types")
    context.run(f"{PYTHON} -m pyrefly check")
    _step("checking GitHub workflows")
    folders = (bake.TEMPLATE / ".github", bake.PROJECT / ".github")
    workflows = [shlex.quote(str(file)) for folder in folders for file in sorted(folder.glob("workflows/*.yml"))]
    context.run(f"{PYTHON} -m check_jsonschema -q --builtin-schema vendor.github-workflows {' '.join(workflows)}")
    zizmor = shlex.quote(str(Path(sys.executable).with_name("zizmor")))  # zizmor is a program, not a Python module
    context.run(f"{zizmor} --quiet --offline {' '.join(workflows)}")


@task(help={"latest": "also try the newest versions that fit together; keep them only if the quick tests pass"})
def lock(context: Context, latest: bool = False) -> None:
    """Compile the project's pins from its requirements/*.in, which take some versions from cookiecutter.json.

    Also store the chat page's scripts from npm, and the names of vLLM's arguments and parsers, if vLLM can be installed
    on this machine.
    """
    if latest:
        _try_latest(context)
        return
    _fetch_scripts(context, bake.TEMPLATE / THIRD_PARTY)
    project = _bake(context, "lock")
    plain = _cuda_variables()
    _step("compiling cluster.txt: CUDA, Linux")
    _compile(context, project, "cluster", CUDA, plain)
    _step("compiling local.txt: CPU, Linux and macOS, with the versions in cluster.txt")
    cpu = os.environ if "UV_FIND_LINKS" in os.environ else plain | {"UV_TORCH_BACKEND": "cpu"}
    options = "--universal --override requirements/local.overrides.txt --constraint requirements/cluster.txt"
    _compile(context, project, "local", options, cpu)
    _step("compiling requirements.txt: the template's own tools")
    _compile_tools(context)
    if sys.platform == "linux":
        _step("storing the names of vLLM's arguments")
        _verb(context, project, "--list > /dev/null")  # installs the new pins
        with context.cd(str(project)):
            context.run(".venv/bin/python -m raymill.serving.vllm_arguments")
        shutil.copyfile(project / VLLM_ARGUMENTS, bake.TEMPLATE / VLLM_ARGUMENTS)


def _fetch_scripts(context: Context, folder: Path) -> None:
    """Fetch the npm packages in packages.json, store their listed files in `folder`, and store the files' SHA-256.

    Raises:
        Exit: npm is not installed, or npm's package is not the pinned one.
    """
    if not shutil.which("npm"):
        raise Exit("error: npm is not installed. Run: sudo apt-get install npm", 1)
    _step("fetching the scripts of the chat page")
    pins = folder / "packages.json"
    packages = json.loads(pins.read_text(encoding="utf-8"))
    for name, package in packages.items():
        release = f"{name}@{package['version']}"
        with tempfile.TemporaryDirectory() as scratch:
            options = f"--silent --ignore-scripts --pack-destination {shlex.quote(scratch)}"
            context.run(f"npm pack {options} {shlex.quote(release)}", hide="out", in_stream=False)
            [archive] = Path(scratch).glob("*.tgz")
            content = archive.read_bytes()
        integrity = f"sha512-{base64.b64encode(hashlib.sha512(content).digest()).decode()}"
        if integrity != package["integrity"]:
            raise Exit(
                f"error: the integrity of {release} is {integrity}, but {pins} has {package['integrity']}. If you"
                f" changed the version, compare with: npm view {release} dist.integrity",
                1,
            )
        with tarfile.open(fileobj=io.BytesIO(content)) as files:
            for stored, file in package["files"].items():
                extracted = files.extractfile(f"package/{file['source']}")
                assert extracted
                (folder / stored).write_bytes(extracted.read())
                file["sha256"] = hashlib.sha256((folder / stored).read_bytes()).hexdigest()
    pins.write_text(json.dumps(packages, indent=2) + "\n", encoding="utf-8")


def _try_latest(context: Context) -> None:
    """Compile and test the newest versions in a copy of the template. Keep them only if its quick tests pass."""
    content = json.loads((bake.TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))
    pinned = {name: content[f"_{name}"] for name in ("ray", "torch", "transformers", "deepspeed", "vllm")}
    newest = _newest_versions(context, pinned)
    changes = [f"{name} {pinned[name]} → {version}" for name, version in newest.items() if version != pinned[name]]
    if not changes:
        print(f"these are the newest versions that fit together: {', '.join(map(' '.join, pinned.items()))}")
        return
    copy = bake.BUILD / "latest"
    _step(f"trying {', '.join(changes)} in {copy}")
    shutil.rmtree(copy, ignore_errors=True)
    bake.snapshot(copy)
    settings = copy / "cookiecutter.json"
    text = settings.read_text(encoding="utf-8")
    for name, version in newest.items():
        text = text.replace(f'"_{name}": "{pinned[name]}"', f'"_{name}": "{version}"')
    settings.write_text(text, encoding="utf-8")
    with context.cd(shlex.quote(str(copy))):
        for verb in ("lock", "test"):
            if context.run(f"{PYTHON} -m invoke {verb}", warn=True, in_stream=False).failed:
                raise Exit(f"error: {verb} fails with {', '.join(changes)}. Nothing is changed. See {copy}", 1)
    project = copy / bake.PROJECT.name
    kept = [settings, copy / VLLM_ARGUMENTS, copy / TOOLS.name, *sorted((project / "requirements").glob("*.txt"))]
    for file in kept:
        shutil.copy(file, bake.TEMPLATE / file.relative_to(copy))
    print(f"the quick tests pass, and the new versions are in place: {', '.join(changes)}. Next: ./inv test --all")


def _newest_versions(context: Context, names: Iterable[str]) -> dict[str, str]:
    """Return the newest versions of these packages that fit together and are a week old."""
    wanted = "\n".join("ray[default,train,serve,data,llm]" if name == "ray" else name for name in names)
    command = f"{UV} pip compile -q {COMMON} --no-header {CUDA} -"
    quiet: dict[str, Any] = {"hide": "out", "env": _cuda_variables(), "replace_env": True}
    found = context.run(command, in_stream=io.StringIO(wanted), **quiet).stdout
    versions = dict(re.findall(r"^([a-z-]+)==(\S+)", found, re.MULTILINE))
    return {name: versions[name] for name in names}


def _install_programs(context: Context) -> None:
    """Install the Debian packages that some tests need. Without root or apt-get, install nothing."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    needed = _rehearsal_programs() | {"chromium": "chromium", "prometheus": "prometheus"}
    missing = [package for program, package in needed.items() if not shutil.which(program, path=path)]
    if not missing or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    _step(f"installing {' '.join(missing)} for the tests")
    quiet: dict[str, Any] = {"hide": "out", "env": {"DEBIAN_FRONTEND": "noninteractive"}}
    context.run("apt-get update -qq", **quiet)
    context.run(f"apt-get install --yes -qq --no-install-recommends {' '.join(missing)}", **quiet)
    # The tests need only the programs. The services would accept connections from elsewhere.
    for package, services in {"openssh-server": "ssh.service ssh.socket", "prometheus": "prometheus.service"}.items():
        if package in missing and shutil.which("systemctl"):
            context.run(f"systemctl disable --now {services}", hide=True, warn=True)


def _rehearsal_programs() -> dict[str, str]:
    """Return the rehearsal's programs and packages. Parses sandbox.py, because its imports are not installed here."""
    module = ast.parse((bake.LIBRARY / "emulator" / "sandbox.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.targets[0]): node.value for node in module.body if isinstance(node, ast.Assign)}
    return ast.literal_eval(assigned["PROGRAMS"])


def _bake(context: Context, name: str) -> Path:
    """Generate a project in build/NAME. First stop the clusters of the project that was there before, if any."""
    project = bake.BUILD / name
    for target in ("local", "rehearsal"):
        if (project / ".cluster" / f"{target}.json").exists():
            _step(f"stopping the {target} cluster of {project}")
            _verb(context, project, f"down --target {target}")
    _step(f"generating a project in {project}")
    bake.bake(project)
    bake.share_environment(project)
    return project


def _verb(context: Context, project: Path, verb: str) -> None:
    """Run a verb of the project. If the verb fails, invoke exits with the verb's exit code."""
    context.run(f"{shlex.quote(str(project / 'inv'))} {verb}", pty=sys.stdout.isatty(), in_stream=False)


def _become(project: Path, *words: str) -> None:
    """Replace this process with a verb of the project, so that signals reach the verb."""
    sys.stdout.flush()
    os.execv(project / "inv", [str(project / "inv"), *words])


def _become_module(project: Path, module: str, *arguments: str, **variables: str) -> None:
    """Replace this process with a module of the template that runs in the project's folder."""
    sys.stdout.flush()
    os.chdir(project)
    path = f"{project}{os.pathsep}{bake.TEMPLATE}"
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], os.environ | variables | {"PYTHONPATH": path})


def _cuda_variables() -> dict[str, str]:
    """Return the environment variables without those that select torch's CPU build."""
    return {name: value for name, value in os.environ.items() if name not in ("UV_FIND_LINKS", "UV_TORCH_BACKEND")}


def _compile(context: Context, project: Path, name: str, options: str, variables: Mapping[str, str]) -> None:
    """Compile one pin file in the project's folder, where relative paths are valid, and copy it to the template."""
    pins = Path("requirements") / f"{name}.txt"
    with context.cd(str(project)):
        context.run(
            f"{UV} pip compile -q {COMMON} {options} requirements/{name}.in -o {pins}",
            env=dict(variables),
            replace_env=True,
        )
    lines = (project / pins).read_text(encoding="utf-8").splitlines()
    markers = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]["environments"]
    text = "".join(f"{_without_needless_marker(line, markers)}\n" for line in lines)
    (bake.PROJECT / pins).write_text(text, encoding="utf-8")


def _compile_tools(context: Context) -> None:
    """Compile the pins of the tools in pyproject.toml. Those that local.txt has too are only there."""
    local = (bake.PROJECT / "requirements" / "local.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in local if not line.startswith(("#", "./"))]  # uv accepts no paths as constraints
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pinned))
        constraints.flush()
        command = (
            f"{UV} pip compile -q {COMMON} --no-header --constraint {shlex.quote(constraints.name)} pyproject.toml"
        )
        found = context.run(command, hide="out", in_stream=False).stdout.splitlines()
    names = {line.partition("==")[0] for line in pinned}
    tools = [line for line in found if line.partition("==")[0] not in names]
    (bake.TEMPLATE / TOOLS.name).write_text("\n".join([TOOLS_HEADER, *tools, ""]), encoding="utf-8")


def _without_needless_marker(line: str, supported: list[str]) -> str:
    """Return a line's pin, without its marker if the marker is true on all supported platforms.

    uv writes such a marker on each line. `supported` has a marker for each platform.
    """
    package, _, marker = line.partition(" ; ")
    values = [dict(re.findall(r"(\w+) == '([^']+)'", one)) for one in supported]
    return package if marker and all(Marker(marker).evaluate(one) for one in values) else line


def _step(title: str) -> None:
    print(f"==> {title}", flush=True)


command_line.normalize(program, Collection.from_module(sys.modules[__name__]))
