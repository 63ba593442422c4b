"""Test the import rules of the project. Each rule is a function that returns the imports that break it.

Imports inside functions and under TYPE_CHECKING count too.
"""

from collections.abc import Callable

import pytest
from dependencies import OF_ALL, OF_JOBS, Graph, cycle, graph_of, is_in, path_to, project_sources

RAY_RUNTIME = "raymill.training.runtimes.ray_train"
PROJECT = graph_of(project_sources())

SLOW = ("deepspeed", "lancedb", "openai", "peft", "ray", "ray.data", "ray.serve", "ray.serve.llm", "ray.train", "torch")
SLOW += ("transformers", "trl", "vllm")
"""Packages whose import takes 0.3 to 8 CPU seconds."""
TRAINS = {"torch", "transformers"}
SERVES = {"ray", "ray.serve"}
AT_START = {
    "jobs.check_network": {"ray", "ray.train", "torch"},
    "jobs.embed": {"lancedb", "ray", *TRAINS},
    "jobs.evaluate": {"ray", "ray.data", "ray.train", *TRAINS},
    "jobs.evaluate_rag": {"lancedb", "openai", *SERVES, *TRAINS},
    "jobs.finetune_ddp": TRAINS,
    "jobs.finetune_deepspeed": TRAINS,
    "jobs.finetune_fsdp": TRAINS,
    "jobs.generate": {"ray.data", "ray.train", "transformers", *SERVES},
    "jobs.models": SERVES,
    "jobs.preprocess": {"ray", "ray.data", "ray.train"},
    "jobs.quantize": {"ray", *TRAINS},
    "jobs.serve_llm": SERVES,
    "jobs.serve_rag": {"lancedb", "openai", *SERVES},
    "jobs.train_classifier": {"ray", "ray.data", "ray.train", "torch"},
    "jobs.train_hf": {"ray", "ray.data", "ray.train", *TRAINS},
    "jobs.tune": {"ray", "ray.train", *TRAINS},
    "raymill.job": set(),
    "raymill.rag.generator": {"openai"},
    "raymill.rag.ingress": SERVES,
    "raymill.rag.pipeline": {"ray", *TRAINS},
    "raymill.rag.retrieval": {"lancedb"},
    "raymill.serving.model_router": SERVES,
    "raymill.serving.routing_state": SERVES,
    "raymill.training.trainer": TRAINS,
    "raymill.verbs": set(),
}
"""The slow packages that a process imports before it does anything: a job, a worker, a replica, a verb."""


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


@pytest.fixture(scope="module")
def at_start() -> Graph:
    """Return the imports that run when a module is imported."""
    return graph_of(project_sources(), late=False)


@pytest.mark.parametrize("module", AT_START)
def test_a_process_imports_no_slow_package_that_it_may_not_need(at_start: Graph, module: str) -> None:
    assert {package for package in SLOW if path_to(at_start, module, package)} == AT_START[module]


def test_each_job_has_a_list_of_slow_packages() -> None:
    assert {name for name in PROJECT if name.startswith("jobs.")} <= AT_START.keys()


def test_only_late_imports_are_ignored() -> None:
    sources = {
        "a": "import b\nif c:\n    import d",
        "b": "def e():\n    import f\nif TYPE_CHECKING:\n    import g\nclass H:\n    import i",
    }
    assert graph_of(sources, late=False) == {"a": {"b", "d"}, "b": {"i"}}


def test_no_import_is_relative() -> None:
    assert [name for names in PROJECT.values() for name in names if name.startswith(".")] == []
