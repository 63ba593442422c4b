"""Test the import rules of the project. Each rule is a function that returns the imports that break it.

Imports inside functions and under TYPE_CHECKING count too.
"""

from collections.abc import Callable

import pytest
from dependencies import OF_ALL, OF_JOBS, Graph, cycle, graph_of, is_in, path_to, project_graph

RAY_RUNTIME = "raymill.training.runtimes.ray_train"
PROJECT = project_graph()


def imports_of_the_verbs(graph: Graph) -> list[str]:
    """Jobs, and what they use of the library, run on the cluster and never import what only verbs use."""
    return _imports(graph, ("jobs", *OF_JOBS), ("raymill",), allowed=(*OF_JOBS, *OF_ALL))


def jobs_that_import_jobs(graph: Graph) -> list[str]:
    """Neither a job nor what jobs use of the library imports a job. Code that several jobs share is in the library."""
    return _imports(graph, ("jobs", *OF_JOBS), ("jobs",))


def ray_in_training(graph: Graph) -> list[str]:
    """Training code imports Ray only in its Ray runtime, and only `launch` imports that runtime."""
    modules = [name for name in graph if is_in(name, "raymill.training") and name != RAY_RUNTIME]
    chains = [path_to(graph, name, "ray", stop_at=RAY_RUNTIME) for name in modules]
    launchers = [name for name in modules if RAY_RUNTIME in graph[name] and name != "raymill.training.launch"]
    return [" -> ".join(chain) for chain in chains if chain] + [f"{name} -> {RAY_RUNTIME}" for name in launchers]


def node_imports(graph: Graph) -> list[str]:
    """What nodes run outside of jobs imports nothing that only verbs use, because `inv up` hashes and restarts it."""
    allowed = (*OF_JOBS, *OF_ALL, "raymill.common")
    shared = _imports(graph, ("raymill.common",), ("raymill",), allowed=allowed)
    return shared + _imports(graph, ("raymill.node",), ("raymill",), allowed=(*allowed, "raymill.node"))


def import_cycle(graph: Graph) -> list[str]:
    """Modules that import each other cannot be understood or tested separately."""
    return cycle(graph)


def _imports(
    graph: Graph, importers: tuple[str, ...], imported: tuple[str, ...], allowed: tuple[str, ...] = ()
) -> list[str]:
    return [
        f"{module} -> {name}"
        for module, names in graph.items()
        for name in sorted(names)
        if is_in(module, *importers) and is_in(name, *imported) and not is_in(name, *allowed)
    ]


RULES = [imports_of_the_verbs, jobs_that_import_jobs, ray_in_training, node_imports, import_cycle]


@pytest.mark.parametrize("rule", RULES)
def test_the_project_follows_the_rule(rule: Callable[[Graph], list[str]]) -> None:
    assert rule(PROJECT) == []


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (imports_of_the_verbs, {"raymill.data.a": "def late():\n    from raymill import local", "raymill.local": ""}),
        (jobs_that_import_jobs, {"jobs.a": "from jobs import b", "jobs.b": ""}),
        (ray_in_training, {"raymill.training.a": "import raymill.data.b", "raymill.data.b": "from ray import data"}),
        (ray_in_training, {"raymill.training.a": f"from {RAY_RUNTIME} import fit", RAY_RUNTIME: "import ray"}),
        (node_imports, {"raymill.node.a": "from raymill import local", "raymill.local": ""}),
        (node_imports, {"raymill.common.a": "from raymill.node.b import c", "raymill.node.b": ""}),
        (
            import_cycle,
            {
                "a": "import b",
                "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from c import d",
                "c": "def e():\n    import a",
            },
        ),
    ],
)
def test_a_broken_rule_is_found(rule: Callable[[Graph], list[str]], sources: dict[str, str]) -> None:
    assert rule(graph_of(sources))


def test_no_import_is_relative() -> None:
    assert [name for names in PROJECT.values() for name in names if name.startswith(".")] == []
