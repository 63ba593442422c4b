"""Hashes of this project's code. They show whether a running cluster has the code of the project's folder."""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from raymill import settings


def of(modules: Iterable[Path]) -> str:
    """Return a hash of these files, and of all files of this project that they import, directly or not."""
    sources: dict[str, bytes] = {}
    waiting = list(modules)
    while waiting:
        file = waiting.pop()
        name = file.relative_to(settings.PROJECT).as_posix()
        if name not in sources:
            sources[name] = file.read_bytes()
            waiting += _project_files(imports(ast.parse(sources[name]))) if file.suffix == ".py" else []
    parts = [part for name, source in sorted(sources.items()) for part in (name.encode(), source)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of everything that a file imports, including inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _project_files(names: Iterable[str]) -> Iterator[Path]:
    """Yield the files in this project that define these dotted names: a module, or a name inside a module."""
    for name in names:
        for module in (name, name.rpartition(".")[0]):
            file = settings.PROJECT / f"{module.replace('.', '/')}.py"
            if file.is_file():
                yield file
                break
