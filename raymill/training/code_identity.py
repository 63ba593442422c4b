"""Identifies the code of a strategy of the user, so that a run does not resume with another loss or optimizer.

The identity is a hash of the syntax tree of the class, and of all code of the project that it uses: its base classes,
and functions, classes and constants, also of other modules in the project. Comments, docstrings and formatting do not
count, and neither does how the script was started. The library's code does not count, because upgrades must not end
runs.
"""

import ast
import hashlib
import inspect
from pathlib import Path

from raymill import settings

KEY = "code of the strategy"
OF_THE_LIBRARY = {KEY: "the library's"}
DOCUMENTED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def identify(strategy: type) -> dict[str, str]:
    """Return the part of a run's identity that depends on the code of its strategy: the class's name and a hash."""
    if strategy.__module__.partition(".")[0] == "raymill":
        return OF_THE_LIBRARY
    file = Path(inspect.getfile(strategy)).resolve()
    trees: dict[tuple[Path, str], str] = {}
    _collect(file, strategy.__qualname__.partition(".")[0], trees)
    # without the order and the places of the definitions, which decide nothing
    digest = hashlib.sha256("\n".join(sorted(trees.values())).encode()).hexdigest()
    return {KEY: f"{strategy.__name__} ({digest[:12]})"}


def _collect(file: Path, name: str, trees: dict[tuple[Path, str], str]) -> None:
    """Add the definition of a global name, and of everything of the project that it uses, to `trees`."""
    if (file, name) in trees:
        return
    module = ast.parse(file.read_text(encoding="utf-8"))
    for node in module.body:
        if name not in _defined(node):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            [alias] = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == name]
            parent = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            trees[file, name] = f"{name} = {parent}{alias.name}"
            for imported, original in _project_files(parent, alias.name):
                _collect(imported, original, trees)
            continue
        trees[file, name] = trees.get((file, name), "") + ast.unparse(_without_docstrings(node))
        for used in {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - {name}:
            _collect(file, used, trees)


def _defined(node: ast.stmt) -> set[str]:
    """Return the global names that a statement defines."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
        case _:
            stored = (one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
            return {one.id for one in stored}


def _project_files(parent: str, name: str) -> list[tuple[Path, str]]:
    """Return the file and the names of what an import takes from the project: one name, or all of a module."""
    if f"{parent}{name}".partition(".")[0] == "raymill":
        return []
    module = _file(f"{parent}{name}")
    if module.is_file():
        tree = ast.parse(module.read_text(encoding="utf-8"))
        return [(module, one) for statement in tree.body for one in sorted(_defined(statement))]
    module = _file(parent.rstrip("."))
    return [(module, name)] if parent and module.is_file() else []


def _file(module: str) -> Path:
    return settings.PROJECT.joinpath(*module.split(".")).with_suffix(".py")


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    for one in ast.walk(node):
        if isinstance(one, DOCUMENTED) and ast.get_docstring(one) is not None:
            one.body = one.body[1:] or [ast.Pass()]
    return node
