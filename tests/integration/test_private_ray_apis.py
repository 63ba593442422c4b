"""Test that the private Ray APIs in use exist, and that only raymill/ray_support/private/ uses them.

After a Ray upgrade, failures in this file show what has changed.
"""

import ast
import asyncio
import inspect
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.autoscaler._private.constants as ray_autoscaler_constants
import ray.autoscaler.v2.instance_manager.config as v2_config
import torch
from dependencies import FILES

from raymill import settings
from raymill.aws.source_hash import imports
from raymill.node import watchdog_head, watchdog_worker
from raymill.ray_support.private import (
    cluster_launcher,
    core,
    data,
    data_llm,
    http,
    job_sdk,
    serve,
    serve_llm,
    serve_router,
    train,
)
from raymill.serving import haproxy
from raymill.serving.rate_limits import RequestLimits

PRIVATE = re.compile(
    r"ray\.(.*\.)?_\w|ray\.(core\.generated|experimental\.internal_kv|dashboard|autoscaler\.v2|train\.v2)\b"
)
EXEMPT = {
    "tests.emulator.test_throttling": "launches machines as Ray's autoscaler does",
    "tests.e2e.test_cluster_dies": "imitates Ray's job server, which states the version of its API",
    "tests.integration.test_haproxy": "writes the HAProxy configuration that Serve writes",
    "tests.integration.test_private_ray_apis": "this file",
    "tests.e2e.test_serve": "looks inside a replica",
    "tests.integration.test_forks": "draws ids as Ray does",
    "tests.integration.test_instance_types": "asks Ray how it names GPUs",
}
ATTRIBUTES = {
    "_asdict": "namedtuple",
    "_fields": "namedtuple",
    "_replace": "namedtuple",
    "_exit": "os",
    "_getframe": "sys",
    "_no_split_modules": "transformers",
    "_prompter": "botocore",
    "_account_id": "moto",
    "_add_stack_event": "moto",
    "_associations": "moto",
    "_delete_resource": "moto",
    "_parsed_resources": "moto",
    "_region_name": "moto",
    "_resource_json_map": "moto",
    "_template": "moto",
    "_load_pretrained_model": "transformers",
    "_attn_implementation": "transformers",
    "_weight_conversions": "transformers",
    "_text_len_check": "vLLM",
    "_tokenize_prompt": "vLLM",
    "_poll_completed_message": "vLLM",
    "_get_reasoner": "vLLM",
    "_type_adapter": "FastAPI",
    "_accelerator_setAllocatorSettings": "torch",
    "_config": "DeepSpeed",
    "_parameters": "moto",
    "_state": "moto",
    "_keep": "SingleProcess, which TorchrunRuntime extends",
}
"""Attributes that begin with `_` and that any code may read, because they do not belong to Ray."""


# ------------------------------------------------------------------------------------------ uses in other modules


def private_uses(module: str, tree: ast.AST) -> Iterator[str]:
    """Yield each private Ray module that a file imports, and each private attribute that it reads on other objects."""
    for name in imports(tree):
        if PRIVATE.match(name):
            yield f"{module} imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr not in ATTRIBUTES:
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and (not module.startswith("tests.") or "ray" in owner.split(".")):
                yield f"{module} reads {owner}.{node.attr}"


def test_only_one_package_uses_private_ray_apis() -> None:
    found = [
        use
        for module, file in FILES.items()
        if not module.startswith("raymill.ray_support.private.") and module not in EXEMPT
        for use in private_uses(module, ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []
    assert EXEMPT.keys() <= FILES.keys()


@pytest.mark.parametrize(
    "code",
    [
        "from ray._raylet import GcsClient",
        "def late():\n    import ray.train.v2._internal.execution",
        "from ray.experimental import internal_kv",
        "from ray.autoscaler.v2.sdk import get_cluster_status",
        "from ray.serve.context import _get_global_client",
        "serve.context._get_global_client()",
        "super()._do_request()",
    ],
)
def test_a_private_use_is_found(code: str) -> None:
    assert list(private_uses("jobs.mine", ast.parse(code)))


@pytest.mark.parametrize("module", sorted(name for name in FILES if name.startswith("raymill.ray_support.private.")))
def test_a_private_module_imports_nothing_from_this_project(module: str) -> None:
    """A package may import its own modules."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    own = f"{module}."
    assert not [name for name in imports(tree) if name.startswith(("raymill", "jobs")) and not name.startswith(own)]


def test_the_watchdog_of_a_worker_stays_small() -> None:
    """A worker's watchdog runs all the time. To save memory, it imports Ray only after a spot notice."""
    code = "import psutil, sys, raymill.node.watchdog_worker as _; "
    code += "print(psutil.Process().memory_info().rss, 'ray' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=settings.PROJECT, capture_output=True, text=True, check=True
    )
    used, has_ray = done.stdout.split()
    assert (int(used) < 100 * 2**20, has_ray) == (True, "False")


# ------------------------------------------------------------------------------------------ the APIs of each module


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


@pytest.fixture
def gcs_address(ray_session: None) -> str:
    return ray.get_runtime_context().gcs_address


def test_core() -> None:
    assert 'kwargs.pop("_temp_dir"' in inspect.getsource(ray.init)
    assert parameters(core.init) == ["folder", "options"]


def test_gcs(gcs_address: str) -> None:
    address = ray.util.get_node_ip_address()
    assert core.node_id(gcs_address, address) == ray.get_runtime_context().get_node_id()
    assert core.DrainNodeReason.Name(1) == "DRAIN_NODE_REASON_IDLE_TERMINATION"
    assert callable(core.GcsClient(address=gcs_address).drain_node)
    own = ray.get_runtime_context().get_job_id()
    assert core.submission_id(gcs_address, own) == ""  # tests/e2e/test_local_target.py submits jobs
    assert not core.job_has_ended(gcs_address, own)
    assert core.job_has_ended(gcs_address, "77000000")
    assert core.draining_nodes(gcs_address) == {}  # test_replica_exit.py drains nodes


def test_autoscaler(gcs_address: str) -> None:
    from ray.autoscaler.v2.schema import LaunchRequest

    status = core.cluster_status(gcs_address)
    assert {"active_nodes", "idle_nodes", "pending_nodes", "pending_launches", "failed_launches"} <= vars(status).keys()
    (node,) = [*status.active_nodes, *status.idle_nodes]
    assert node.node_id == ray.get_runtime_context().get_node_id()
    assert {"ray_node_type_name", "instance_id", "ip_address", "details"} <= vars(node).keys()
    launch = {"ray_node_type_name", "count", "details", "failed_ts_s"}
    assert launch <= set(parameters(LaunchRequest))
    demands = status.resource_demands
    assert (demands.ray_task_actor_demand, demands.placement_group_demand) == ([], [])
    assert hasattr(status.stats, "autoscaler_version")


def test_the_autoscaler_reads_the_variables_of_cluster_yaml() -> None:
    """The watchdog and the autoscaler wait equally long for an instance that EC2 has ended during its launch."""
    text = (settings.PROJECT / "cluster" / "cluster.yaml").read_text(encoding="utf-8")
    variables = dict(re.findall(r"\b(RAY_AUTOSCALER_\w+)=(\d+)", text))
    assert variables["RAY_AUTOSCALER_RECONCILE_REQUEST_STATUS_TIMEOUT_S"] == f"{watchdog_head.REQUEST_TIMEOUT_S:.0f}"
    assert len(variables) == 3
    source = inspect.getsource(v2_config) + inspect.getsource(ray_autoscaler_constants)
    assert [name for name in variables if f'"{name}"' not in source] == []


def test_cluster_launcher() -> None:
    assert parameters(cluster_launcher.bootstrap_aws) == ["config"]
    assert parameters(cluster_launcher.prepare_config) == ["config"]
    assert parameters(cluster_launcher.validate_config) == ["config"]
    assert cluster_launcher.hash_launch_conf({"InstanceType": "a"}, {}) == cluster_launcher.hash_launch_conf(
        {"InstanceType": "a"}, {}
    )


@pytest.mark.usefixtures("ray_session")
def test_key_value() -> None:
    assert core.get_value("absent", "tests") is None
    for value in ("first", "second"):
        core.put_value("key", value, "tests")
        assert core.get_value("key", "tests") == value.encode()


@pytest.mark.usefixtures("ray_session")
def test_serve() -> None:
    assert parameters(serve.serve.context._get_global_client) == ["raise_if_no_controller_running"]
    serve.forget_dead_client()
    from ray.serve._private import client, replica

    assert isinstance(client.ServeControllerClient.http_config, property)
    assert callable(client.ServeControllerClient.get_serve_details)
    assert callable(replica.ReplicaActor.get_num_ongoing_requests)
    assert "self._direct_ingress_http_server" in inspect.getsource(replica)
    assert "self._replica_impl" in inspect.getsource(replica)
    assert isinstance(serve.global_worker.actors, dict)
    session = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1]
    assert serve.logs_folder().resolve() == (session / "logs" / "serve").resolve()


@pytest.mark.parametrize(("seconds", "stops"), [(120.0, True), (120.0 + watchdog_worker.POSTPONED_S, False)])
def test_serve_stops_a_replica_that_may_take_longer_to_stop_than_its_node_lasts(seconds: float, stops: bool) -> None:
    """So the watchdog tells Ray a later end of the node at first."""
    from ray.serve._private.deployment_state import DeploymentState

    limits = RequestLimits(1, 1, 1, timeout_s=haproxy.MAX_REQUEST_TIMEOUT_S)
    actor = SimpleNamespace(graceful_shutdown_timeout_s=limits.shutdown_s)
    only: Any = SimpleNamespace(actor_node_id="node", _actor=actor)
    state: Any = SimpleNamespace(
        _group_effective_deadline=DeploymentState._group_effective_deadline,
        _group_shutdown_timeout_ms=DeploymentState._group_shutdown_timeout_ms,
    )
    deadlines = {"node": 1000 * (time.time() + seconds)}
    stopped, kept = DeploymentState._partition_groups_to_stop(state, [[only]], deadlines, 0)
    assert (stopped, kept) == (([only], []) if stops else ([], [only]))


def test_http_protocol() -> None:
    """test_trailers.py tests what the protocol does."""
    from ray.serve._private import proxy, replica
    from uvicorn import config

    assert config.HTTP_PROTOCOLS["auto"] == f"{http.auto.__name__}:AutoHTTPProtocol"
    for server in (proxy, replica):
        assert "configure_http_middlewares(" in inspect.getsource(server)


def test_serve_router() -> None:
    router = serve_router.RequestRouter
    assert {"_pending_requests_to_fulfill", "_deployment_id"} <= set(
        re.findall(r"self\.(\w+)", inspect.getsource(router))
    )
    assert parameters(router._choose_replica_for_request)[:2] == ["self", "pending_request"]
    assert issubclass(serve_router.PowerOfTwoChoicesRequestRouter, router)


def test_serve_llm() -> None:
    server = serve_llm.LLMServer
    assert "self._start_engine()" in inspect.getsource(server.start)
    assert parameters(server.__serve_build_asgi_app__) == ["self"]
    assert not {"build_asgi_app", "start_engine"} & set(dir(server)), "our hooks would override Ray's methods"
    callback = serve_llm.NodeCallback(llm_config=None, ctx_kwargs={"runtime_env": {"env_vars": {}}})
    assert (callback.ctx.run_init_node, callback.ctx.runtime_env) == (True, {"env_vars": {}})
    assert inspect.iscoroutinefunction(callback.on_before_node_init)
    assert parameters(serve_llm._build_openai_ingress_request_router) == ["server", "llm_config"]
    assert parameters(serve_llm.Application._with_ingress_request_router) == ["self", "ingress_request_router"]


@pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")
def test_engine_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    from raymill.ray_support.private import engine_metrics

    logger = engine_metrics.RayPrometheusStatLogger
    for name in ("_gauge_cls", "_counter_cls", "_histogram_cls"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    engine_metrics.install()
    gauge: Any = logger._gauge_cls("test_gauge", labelnames=["model"]).labels("a")
    counters: list[Any] = [logger._counter_cls("test_counter", labelnames=["model"]).labels(model) for model in "ab"]
    histogram: Any = logger._histogram_cls("test_histogram", labelnames=["model"], buckets=[1.0]).labels("a")
    sent = []

    def record(value: float, tags: dict[str, str]) -> None:
        sent.append((value, tags["model"]))

    for each, method in ((gauge, "set"), (counters[0], "inc"), (counters[1], "inc"), (histogram, "observe")):
        monkeypatch.setattr(each, "metric", SimpleNamespace(**{method: record}))

    async def steps() -> None:
        for value in (1, 2):
            gauge.set(value)
            counters[0].inc(value)
            counters[1].inc(0)  # Ray rejects an increment of 0
            histogram.observe(value)
        assert sent == []
        await asyncio.sleep(2 * engine_metrics.INTERVAL_S)
        assert sent == [(2, "a"), (3, "a"), (1, "a"), (2, "a")]
        counters[1].inc()
        await asyncio.sleep(2 * engine_metrics.INTERVAL_S)
        assert sent[4:] == [(1, "b")]

    asyncio.run(steps())


@pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")
def test_cpu_lora() -> None:
    """Tokens without an adapter keep their values, whatever the adapters of the other tokens hold."""
    from raymill.ray_support.private import cpu_lora

    indices = torch.tensor([0, -1, 1, -1])  # the adapters in slots 0 and 1, and none
    inputs, start = torch.rand(4, 3), torch.rand(4, 5)
    weights = torch.rand(2, 1, 5, 3)
    calls: dict[str, tuple[Any, ...]] = {"bgmv_shrink": (), "bgmv_expand": (True,), "bgmv_expand_slice": (0, 5, True)}
    assert tuple(calls) == cpu_lora.OPERATIONS
    for name, arguments in calls.items():
        patched = getattr(cpu_lora.lora_ops, name)
        assert getattr(cpu_lora.punica_cpu, name).__wrapped__ is patched.__wrapped__
        whole = start.clone()
        patched(inputs, weights, whole, indices, *arguments)
        assert torch.equal(whole[1::2], start[1::2])
        for row in (0, 2):
            alone = start[row : row + 1].clone()
            patched.__wrapped__(inputs[row : row + 1], weights, alone, indices[row : row + 1], *arguments)
            torch.testing.assert_close(whole[row : row + 1], alone)
        broken = start.clone()
        patched(inputs, weights * torch.tensor([1.0, torch.nan]).view(2, 1, 1, 1), broken, indices, *arguments)
        assert torch.equal(broken[1::2], start[1::2])
        original = start.clone()
        patched.__wrapped__(inputs, weights, original, indices, *arguments)
        assert not torch.equal(original[1::2], start[1::2]), "vLLM itself skips such tokens now: delete cpu_lora.py"


@pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")
def test_the_operations_for_sequences_use_those_of_cpu_lora() -> None:
    from raymill.ray_support.private import cpu_lora

    start = torch.rand(4, 5)
    slots, lengths = torch.tensor([-1, 1]), torch.tensor([3, 1])
    for name, arguments in {"sgmv_shrink": (1.0,), "sgmv_expand": (True,), "sgmv_expand_slice": (0, 5, True)}.items():
        output = start.clone()
        metadata = (torch.tensor([0, 3]), lengths, slots, 2, 3, 4)
        getattr(cpu_lora.lora_ops, name)(torch.rand(4, 3), torch.rand(2, 1, 5, 3), output, *metadata, *arguments)
        assert torch.equal(output[:3], start[:3])
        assert not torch.equal(output[3:], start[3:])


def test_data() -> None:
    import pyarrow as pa

    parts = data.partition(pa.table({"column": pa.array(range(100), pa.int32())}), "column", 3)
    assert sorted(parts) == [0, 1, 2]
    assert sum(len(part) for part in parts.values()) == 100
    assert issubclass(data.ShuffleDiskError, RuntimeError)
    assert parameters(data.get_or_create_autoscaling_coordinator) == []


def test_data_llm() -> None:
    stage = data_llm.vLLMEngineStageUDF
    assert parameters(stage._generate_with_error_handling) == ["self", "row", "batch_uuid"]
    assert inspect.isasyncgenfunction(stage.udf)
    assert "self._generate_with_error_handling(row, batch_uuid)" in inspect.getsource(stage.udf)
    from ray.llm._internal.batch.stages.base import StatefulStage

    assert {"fn", "fn_constructor_kwargs"} <= StatefulStage.model_fields.keys()
    assert "self.stages" in inspect.getsource(data_llm.Processor)


def test_train() -> None:
    assert train.context.logger.name == train.context.__file__
    train.quiet_reports()
    assert not train.context.logger.isEnabledFor(logging.INFO)


def test_tune() -> None:
    assert not train.is_in_trial()


def test_job_sdk() -> None:
    client = job_sdk.JobSubmissionClient
    assert parameters(client._do_request)[:3] == ["self", "method", "endpoint"]
    assert not hasattr(client, "send"), "our hook would override Ray's method"
    for name in job_sdk.LOGGERS[1:]:
        assert sys.modules[name].logger.name == name
