"""The project's own modules, and what they import: read from the files, without importing them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import settings

FOLDERS = ("jobs", "pipeline", "cluster", "demo", "tests")


def _modules() -> dict[str, Path]:
    files = [
        *settings.PROJECT.glob("*.py"),
        *(file for folder in FOLDERS for file in sorted((settings.PROJECT / folder).rglob("*.py"))),
    ]
    names = {".".join(file.relative_to(settings.PROJECT).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


FILES = _modules()
"""The file of each module, by the module's dotted name."""


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of everything that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
