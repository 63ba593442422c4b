"""Merge the template's changes since the project was generated into the project, with cruft.

cruft exits with 0 when changes conflict, and outside git, where its changes could not be undone. So this module checks
both. It imports only the standard library, so that an upgrade does not depend on the installed packages.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from raymill import environment
from raymill.environment import PROJECT

CRUFT = "cruft==2.16.0"
LINK = PROJECT / ".cruft.json"  # the template's address and commit, and the answers
PINS = ("requirements/cluster.txt", "requirements/local.txt")
UNDO = "git reset --hard && git clean -d --force"
COMMIT = "git add --all && git commit --message 'Upgrade from the template'"


def upgrade() -> bool:
    """Merge the template's changes into the project's files, and print them. Return whether there were any.

    Exits with an error if the project is not linked or has uncommitted changes, and if changes conflict.
    """
    template, old = _link()
    _require_clean_repository()
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "template"
        if subprocess.run(["git", "clone", "--quiet", template, str(clone)], cwd=PROJECT).returncode:
            _fail(f"git cannot clone the template {template}; its message is above. Fix the cause, then try again")
        if subprocess.run(["git", "cat-file", "-e", f"{old}^{{commit}}"], cwd=clone, capture_output=True).returncode:
            _fail(
                f"the template {template} no longer has the commit {old[:9]}, which this project was generated from. "
                f"Write the commit that it was rebased to into {LINK.name}, then run: {COMMIT}"
            )
        new = _git("rev-parse", "HEAD", folder=clone)
        if new == old:
            print(f"the project has the newest version of its template ({old[:9]} of {template})")
            return False
        print(f"upgrading from {old[:9]} to {new[:9]} of {template}", flush=True)
        changelogs = [_git("show", f"{version}:CHANGELOG.md", folder=clone, may_fail=True) for version in (old, new)]
        errors = _run_cruft(clone)
    for line in new_entries(*changelogs):
        print(line)
    _require_no_conflicts(errors)
    return True


def new_entries(old: str, new: str) -> list[str]:
    """Return the entries of the changelog `new` that are not in `old`, each group below its headings."""
    known, lines, headings = {_words(block) for block in _blocks(old)}, [], []
    for block in _blocks(new):
        if heading := re.match(r"#+(?= )", block):
            headings = [one for one in headings if len(one.split(" ")[0]) < len(heading[0])] + [block.strip()]
        elif _words(block) not in known:
            lines += [*headings, block.rstrip()]
            headings = []
    return lines


def _blocks(changelog: str) -> list[str]:
    """Return the headings and list entries of a changelog. Skip its title and introduction."""
    return [block for block in re.split(r"\n(?=- |#)", changelog) if re.match("- |##", block)]


def _words(block: str) -> str:
    return " ".join(block.split())


def _link() -> tuple[str, str]:
    """Return the template's address and the commit that the project has."""
    if not LINK.exists():
        _fail(
            "this project is not linked to its template. Run, with the template's address, and the commit that the "
            f"project was generated from: uv tool run --from {CRUFT} cruft link ADDRESS --checkout COMMIT. "
            f"Then commit {LINK.name}"
        )
    try:
        link = json.loads(LINK.read_bytes())
        return link["template"], link["commit"]
    except (ValueError, TypeError, KeyError):
        _fail(f"{LINK.name} is damaged. Run: git checkout {LINK.name}")


def _require_clean_repository() -> None:
    """Exit unless the project is in a git repository without changes, so that an upgrade can be undone."""
    if not shutil.which("git"):
        _fail("git is not installed. Run: sudo apt-get install git")
    if _git("rev-parse", "--is-inside-work-tree", may_fail=True) != "true":
        _fail(
            "this folder is not in a git repository, so an upgrade could not be undone. Run: git init && "
            "git add --all && git commit --message 'Before the upgrade'"
        )
    if changes := _git("status", "--porcelain"):
        first = ", ".join(line[3:] for line in changes.splitlines()[:3])
        _fail(
            f"there are uncommitted changes ({first}), so an upgrade could not be undone. Run: git stash "
            "--include-untracked, or commit them"
        )


def _run_cruft(clone: Path) -> list[str]:
    """Run `cruft update` with this clone of the template. Print its warnings, and return git's errors."""
    _, variables = environment.package_sources(environment.pip_settings())
    tool = [environment.find_uv(), "tool", "run", "--quiet", "--python", sys.executable, "--from", CRUFT]
    done = subprocess.run(
        [*tool, "cruft", "update", "--skip-apply-ask", "--template-path", str(clone)],
        cwd=PROJECT,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    for warning in {line for line in lines if line.startswith("warning: ")}:
        print(warning)
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if done.returncode:
        reason = "; ".join(errors) or "\n".join(lines[-20:])
        _fail(f"cruft could not generate the new version. Nothing has changed. The reason: {reason}")
    return errors


def _require_no_conflicts(errors: list[str]) -> None:
    """Exit if git could not merge all changes: unmerged files, conflict markers, rejected changes, or `errors`."""
    unmerged = _git("diff", "--name-only", "--relative", "--diff-filter=U")
    marked = _git("grep", "--name-only", "-e", "^<<<<<<< ", may_fail=True)
    rejected = _git("ls-files", "--others", "--exclude-standard", "--", "*.rej")
    conflicts = sorted({*unmerged.splitlines(), *marked.splitlines(), *rejected.splitlines()})
    if pins := " ".join(name for name in PINS if name in conflicts):
        print(f"instead of editing {pins}, run: git checkout --theirs {pins}   then the command in its first lines")
    if conflicts:
        _fail(
            f"the template's changes conflict with yours in {', '.join(conflicts)}. Edit these files (conflicts are "
            f"between <<<<<<< and >>>>>>>, and .rej files contain changes that git could not apply), then run: "
            f"inv test && {COMMIT}   Or undo the upgrade: {UNDO}"
        )
    if errors:
        _fail(f"git could not apply all changes of the template: {'; '.join(errors)}. Undo the upgrade: {UNDO}")


def _git(*words: str, folder: Path | None = None, may_fail: bool = False) -> str:
    """Run git in the project or in `folder`, and return its output. Exits if git fails, unless `may_fail` is set."""
    done = subprocess.run(["git", *words], cwd=folder or PROJECT, capture_output=True, text=True)
    if done.returncode and not may_fail:
        _fail(f"`git {words[0]}` failed: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def _fail(problem: str) -> NoReturn:
    sys.exit(f"error: {problem}")
