"""After the project is created, add the library, link the project to its template, and commit it to a new repository.

The last two are conveniences. If one is not possible, this prints the reason, and the project is complete without it.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# The only lines with Jinja. JSON escapes quotes and newlines, so the raw strings are valid Python for all answers.
ANSWERS = dict(json.loads(r"""{{ cookiecutter.items() | list | tojson }}"""))  # a list, because tojson sorts mappings
TEMPLATE = Path(*json.loads(r"""{{ [template_folder] | tojson }}"""))

PROJECT = Path.cwd()
# `cruft update` and `cruft diff` generate the project in a temporary folder, to compare it with the other version.
IS_COMPARISON = "_commit" in ANSWERS and PROJECT.parent.parent == Path(tempfile.gettempdir()).resolve()
OF_THIS_MACHINE = ("_checkout", "_output_dir", "_repo_dir")
TIMEOUT_S = 60

# Settings of the user that could skip files, run programs, ask for a passphrase or fail.
OPTIONS = {
    "commit.gpgSign": "false",
    "core.excludesFile": "",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.safecrlf": "false",
    "init.defaultBranch": "main",  # the branch of .github/workflows/test.yml
}
# Variables with which git would use another repository. git sets them for its hooks.
REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")


def git(*words: str, folder: Path = PROJECT, may_fail: bool = False) -> str:
    """Run git without prompts, and return its output.

    Raises:
        RuntimeError: git failed. The message is git's last line.
    """
    options = [word for name, value in OPTIONS.items() for word in ("-c", f"{name}={value}")]
    done = subprocess.run(
        ["git", "--no-optional-locks", *options, *words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in REPOSITORY_VARIABLES},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=TIMEOUT_S,
    )
    if done.returncode and not may_fail:
        raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    return done.stdout.strip()


def add_library() -> None:
    """Copy the library. In the template, it is outside the project's folder, because it has no variables."""
    shutil.copytree(TEMPLATE / "raymill", PROJECT / "raymill", ignore=shutil.ignore_patterns("__pycache__"))


def link() -> None:
    """Record the template's address and commit in .cruft.json, with the bytes that `cruft create` will write."""
    if not (TEMPLATE / ".git").exists():  # for example from a zip file
        return
    if git("status", "--porcelain", folder=TEMPLATE):
        raise RuntimeError("the template has uncommitted changes")
    if "_commit" in ANSWERS or ANSWERS["_repo_dir"] == ANSWERS["_template"]:
        template = ANSWERS["_template"] if "_commit" in ANSWERS else str(TEMPLATE)
    else:
        template = git("remote", "get-url", "origin", folder=TEMPLATE)  # cruft does not know gh:OWNER/REPOSITORY
    commit = git("rev-parse", "HEAD", folder=TEMPLATE)
    context = {name: answer for name, answer in ANSWERS.items() if name not in OF_THIS_MACHINE}
    state = {
        "template": template,
        "commit": commit,
        "checkout": None,
        "context": {"cookiecutter": context | {"_template": template, "_commit": commit}},
        "directory": None,
    }
    (PROJECT / ".cruft.json").write_text(json.dumps(state, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def commit() -> None:
    """Commit the project to a new repository, unless it is inside another one."""
    if any((folder / ".git").exists() for folder in (PROJECT, *PROJECT.parents)):
        return
    name = ANSWERS["project_slug"]
    identity = {"user.name": name, "user.email": f"{name}@localhost"}
    missing = {key: value for key, value in identity.items() if not git("config", key, may_fail=True)}
    try:
        git("init", "--quiet", "--template=")
        git("add", "--all")
        words = [word for key, value in missing.items() for word in ("-c", f"{key}={value}")]
        git(*words, "commit", "--quiet", "--no-verify", "--message", "Generate the project from its template")
    except (OSError, RuntimeError, subprocess.SubprocessError):
        shutil.rmtree(PROJECT / ".git", ignore_errors=True)
        raise


def main() -> None:
    add_library()
    if IS_COMPARISON:
        return
    if not shutil.which("git"):
        print("note: git is not installed, so the project is in no git repository, which `inv upgrade` needs")
        return
    for consequence, step in (
        ("the project is not linked to its template, so `inv upgrade` will not work", link),
        ("the project has no git repository", commit),
    ):
        try:
            step()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"note: {consequence}: {error}")


main()
