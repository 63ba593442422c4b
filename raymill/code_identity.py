"""Identifies code of the user, such as a strategy, so that a run does not resume with another loss or optimizer.

The identity is a hash of the syntax tree of a class or function, and of all code of the project that it uses: base
classes, functions, classes and constants, also of other modules in the project. Comments, docstrings and formatting do
not count, and neither does how the script was started. The library's code does not count, because upgrades must not end
runs.
"""

import ast
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raymill import settings
from raymill.errors import UserError

KEY = "code of the strategy"
LIBRARY = "the library's"
OF_THE_LIBRARY = {KEY: LIBRARY}
DOCUMENTED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def identify(strategy: type) -> dict[str, str]:
    """Return the part of a run's identity that depends on the code of its strategy: the class's name and a hash."""
    return {KEY: name(strategy)}


def name(code: Callable[..., Any]) -> str:
    """Return the name and a hash of a class or function of the user, or LIBRARY.

    Raises:
        UserError: a lambda, or an object that has no definition of its own.
    """
    defined = getattr(code, "__qualname__", "<lambda>").partition(".")[0]
    if defined == "<lambda>":
        raise UserError(f"{code!r} has no name, so a change of it cannot be seen. Define it with def, or as a class.")
    if code.__module__.partition(".")[0] == "raymill":
        return LIBRARY
    file = Path(inspect.getfile(code)).resolve()
    trees: dict[tuple[Path, str], str] = {}
    _collect(file, defined, trees)
    # without the order and the places of the definitions, which decide nothing
    digest = hashlib.sha256("\n".join(sorted(trees.values())).encode()).hexdigest()
    return f"{code.__name__} ({digest[:12]})"


def _collect(file: Path, name: str, trees: dict[tuple[Path, str], str]) -> None:
    """Add the definition of a global name, and of everything of the project that it uses, to `trees`."""
    if (file, name) in trees:
        return
    trees[file, name] = ""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            _follow(node, file, {name}, trees)
        elif name in _defined(node):
            trees[file, name] += ast.unparse(_without_docstrings(node))
            for one in ast.walk(node):
                if isinstance(one, ast.Import | ast.ImportFrom):
                    _follow(one, file, {_bound(alias) for alias in one.names}, trees)
                elif isinstance(one, ast.Name) and one.id != name:
                    _collect(file, one.id, trees)


def _follow(node: ast.Import | ast.ImportFrom, file: Path, names: set[str], trees: dict[tuple[Path, str], str]) -> None:
    """Add what an import binds to these names. `*` binds all names that its module defines."""
    level = node.level if isinstance(node, ast.ImportFrom) else 0
    package = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    folder = file.parents[level - 1] if level else settings.PROJECT
    for alias in node.names:
        dotted = f"{package}.{alias.name}".strip(".")
        if alias.name != "*" and _bound(alias) not in names:
            continue
        if alias.name != "*":
            trees[file, _bound(alias)] = f"{_bound(alias)} = {'.' * level}{dotted}"
        if dotted.partition(".")[0] == "raymill" and not level:
            continue
        if module := _find(folder, dotted):
            wanted = _names(module)
        elif package and (module := _find(folder, package)):
            wanted = names & _names(module) if alias.name == "*" else {alias.name}
        else:
            continue
        for one in sorted(wanted):
            _collect(module, one, trees)


def _bound(alias: ast.alias) -> str:
    """Return the name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def _find(folder: Path, dotted: str) -> Path | None:
    """Return the file of a module or package in this folder, or None."""
    path = folder.joinpath(*dotted.split("."))
    found = (file for file in (path.with_name(f"{path.name}.py"), path / "__init__.py") if file.is_file())
    return next(found, None)


def _names(module: Path) -> set[str]:
    """Return all global names that a module defines or imports."""
    body = ast.parse(module.read_text(encoding="utf-8")).body
    return {name for node in body for name in _defined(node)}


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines, also inside `if` and `try`."""
    if isinstance(node, DOCUMENTED):
        return {node.name}
    found: set[str] = set()
    for one in ast.walk(node):
        match one:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {_bound(alias) for alias in names}
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    for one in ast.walk(node):
        if isinstance(one, DOCUMENTED) and ast.get_docstring(one) is not None:
            one.body = one.body[1:] or [ast.Pass()]
    return node
