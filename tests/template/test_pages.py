"""Test that the template's pages name only verbs that exist."""

import ast
import re
from pathlib import Path

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", ".github/pull_request_template.md")


def test_pages_name_verbs_that_exist(template: Path) -> None:
    verbs = _verbs(template / "tasks.py") | _verbs(template / "raymill" / "verbs.py")
    text = "\n".join((template / page).read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"\./inv ([a-z][a-z-]*)", text))
    assert len(named) > 10
    assert not named - verbs


def _verbs(file: Path) -> set[str]:
    """Return the names of the verbs, which are the public functions with a decorator."""
    functions = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    public = [function.name for function in functions if function.decorator_list and function.name[0] != "_"]
    return {name.strip("_").replace("_", "-") for name in public}
