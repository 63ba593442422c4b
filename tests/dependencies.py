"""Finds the imports of this project by parsing its files, without importing any module."""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import bake
from raymill import settings
from raymill.aws import source_hash

FOLDERS = ("jobs", "raymill")
OF_JOBS = tuple(
    f"raymill.{name}"
    for name in (
        *("data", "training", "tuning", "evaluation", "generation", "quantization", "serving", "rag", "ray_support"),
        *("code_identity", "job", "model_config", "optional", "output_lease", "plots"),
    )
)
"""What jobs use of the library, and verbs too."""
OF_ALL = tuple(
    f"raymill.{name}"
    for name in ("errors", "job_context", "settings", "sections", "instance_types", "printable", "state_files")
)

Graph = Mapping[str, set[str]]
"""Maps each module to its imports: modules of this project, and dotted names from other packages."""


def _files() -> dict[str, Path]:
    """Return the file of each module, keyed by the module's dotted name."""
    folders = [settings.PROJECT / folder for folder in FOLDERS]
    files = [*settings.PROJECT.glob("*.py"), *(file for folder in folders for file in sorted(folder.rglob("*.py")))]
    tests = sorted((bake.TEMPLATE / "tests").rglob("*.py"))
    found = [(settings.PROJECT, file) for file in files] + [(bake.TEMPLATE, file) for file in tests]
    names = [".".join(file.relative_to(root).with_suffix("").parts) for root, file in found]
    return {name.removesuffix(".__init__"): file for name, (_, file) in zip(names, found, strict=True)}


FILES = _files()


def graph_of(sources: Mapping[str, str], *, late: bool = True) -> Graph:
    """Return the import graph of some modules, given their source code.

    Without `late`, it lacks the imports inside functions and under TYPE_CHECKING.
    """
    trees = {module: ast.parse(source) for module, source in sources.items()}
    if not late:
        for tree in trees.values():
            _WithoutLateImports().visit(tree)  # changes it in place
    return {
        module: {_resolve(name, sources) for name in source_hash.imports(tree)} - {module}
        for module, tree in trees.items()
    }


class _WithoutLateImports(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST | None:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        return None if is_function or is_for_types else self.generic_visit(node)


def project_sources() -> dict[str, str]:
    """Return the source code of this project, without its tests."""
    return {name: file.read_text(encoding="utf-8") for name, file in FILES.items() if name.partition(".")[0] != "tests"}


def _resolve(name: str, modules: Mapping[str, str]) -> str:
    """Return the module in `modules` that defines `name`, or `name` itself if it is a module or not in `modules`."""
    parent = name.rpartition(".")[0]
    return parent if name not in modules and parent in modules else name


def is_in(name: str, *packages: str) -> bool:
    """Return whether a module is one of these packages, or is inside one of them."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def path_to(graph: Graph, start: str, package: str, *, stop_at: str = "") -> list[str]:
    """Return a shortest chain of imports from a module to a package, or an empty list if there is none.

    The chain does not pass through `stop_at`.
    """
    chains, seen = [[start]], {start}
    for chain in chains:
        for name in sorted(graph.get(chain[-1], set()) - seen):
            if is_in(name, package):
                return [*chain, name]
            seen.add(name)
            if name != stop_at:
                chains.append([*chain, name])
    return []


def cycle(graph: Graph) -> list[str]:
    """Return one import cycle, or an empty list if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []
