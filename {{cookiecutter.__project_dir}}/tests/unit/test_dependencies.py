"""Test the import rules of the project. Each rule is a function that returns the imports that break it.

Imports inside functions and under TYPE_CHECKING count too.
"""

from collections.abc import Callable

import pytest
from dependencies import Graph, cycle, graph_of, is_in, path_to, project_graph

RAY_RUNTIME = "pipeline.training.runtimes.ray_train"
PROJECT = project_graph()


def foreign_cluster_imports(graph: Graph) -> list[str]:
    """Only the verbs use `cluster`. Jobs and `pipeline`, which run on the cluster, never import it."""
    return _imports(graph, ("jobs", "pipeline"), ("cluster",))


def jobs_that_import_jobs(graph: Graph) -> list[str]:
    """Neither a job nor `pipeline` imports a job. Code that several jobs share is in `pipeline`."""
    return _imports(graph, ("jobs", "pipeline"), ("jobs",))


def ray_in_training(graph: Graph) -> list[str]:
    """Training code imports Ray only in its Ray runtime, and only `launch` imports that runtime."""
    modules = [name for name in graph if is_in(name, "pipeline.training") and name != RAY_RUNTIME]
    chains = [path_to(graph, name, "ray", stop_at=RAY_RUNTIME) for name in modules]
    launchers = [name for name in modules if RAY_RUNTIME in graph[name] and name != "pipeline.training.launch"]
    return [" -> ".join(chain) for chain in chains if chain] + [f"{name} -> {RAY_RUNTIME}" for name in launchers]


def node_imports(graph: Graph) -> list[str]:
    """From `cluster`, only `node` and `common` are copied to machines, so they import nothing else of `cluster`."""
    shared = _imports(graph, ("cluster.common",), ("cluster",), allowed=("cluster.common",))
    return shared + _imports(graph, ("cluster.node",), ("cluster",), allowed=("cluster.common", "cluster.node"))


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


RULES = [foreign_cluster_imports, jobs_that_import_jobs, ray_in_training, node_imports, import_cycle]


@pytest.mark.parametrize("rule", RULES)
def test_the_project_follows_the_rule(rule: Callable[[Graph], list[str]]) -> None:
    assert rule(PROJECT) == []


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (foreign_cluster_imports, {"pipeline.a": "def late():\n    from cluster import local", "cluster.local": ""}),
        (jobs_that_import_jobs, {"jobs.a": "from jobs import b", "jobs.b": ""}),
        (ray_in_training, {"pipeline.training.a": "import pipeline.data.b", "pipeline.data.b": "from ray import data"}),
        (ray_in_training, {"pipeline.training.a": f"from {RAY_RUNTIME} import fit", RAY_RUNTIME: "import ray"}),
        (node_imports, {"cluster.node.a": "from cluster import local", "cluster.local": ""}),
        (node_imports, {"cluster.common.a": "from cluster.node.b import c", "cluster.node.b": ""}),
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
