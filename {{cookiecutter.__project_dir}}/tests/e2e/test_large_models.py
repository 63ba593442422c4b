"""Test models that need several GPUs or machines: the plan that Ray gets, and two processes that share each layer."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import settings
from instance_types import INSTANCE_TYPES
from pipeline.ray_support import gpu_section
from pipeline.serving.options import ServeOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")

ANSWER = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    engine = LLM(
        sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=2**26,
        tensor_parallel_size=int(sys.argv[2]),
    )
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    print("tokens", engine.generate(["def main"], sampling)[0].outputs[0].token_ids)
"""


@pytest.mark.parametrize("instances", [1, 2])
def test_the_autoscaler_starts_the_machines_that_a_model_needs(instances: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallel over the 8 GPUs of each machine, and pipeline parallel over the machines."""
    from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil
    from ray.core.generated.autoscaler_pb2 import GangResourceRequest

    from pipeline.serving import app

    section = gpu_section.GpuSection(serve_instance_type="p4d.24xlarge")
    monkeypatch.setattr(gpu_section, "load", lambda: section)
    served = settings.load(ServeOptions, "serve", profile="cluster")
    changes = {"tensor_parallel_size": 8, "pipeline_parallel_size": instances}
    engine = app.llm_config(served.model_copy(update=changes)).get_engine_config()
    assert engine.placement_strategy == "PACK"  # as few machines as possible
    assert engine.placement_bundles == [{"GPU": 1, "accelerator_type:A100": 0.001}] * 8 * instances

    types = {"cpu": {"CPU": 8}}
    for name in ("g6.12xlarge", "p5.48xlarge", "p4d.24xlarge"):
        gpu = INSTANCE_TYPES[name].gpu
        types[name] = {"CPU": 48, "GPU": gpu.count, f"accelerator_type:{gpu.accelerator}": 1}
    configs = {
        name: NodeTypeConfig(name=name, min_worker_nodes=0, max_worker_nodes=4, resources=resources)
        for name, resources in types.items()
    }
    gang = GangResourceRequest(requests=[ResourceRequestUtil.make(bundle) for bundle in engine.placement_bundles])
    plan = ResourceDemandScheduler(mock.MagicMock()).schedule(
        SchedulingRequest(
            node_type_configs=configs,
            disable_launch_config_check=True,
            max_num_nodes=10,
            gang_resource_requests=[gang],
        )
    )
    assert [(launch.instance_type, launch.count) for launch in plan.to_launch] == [("p4d.24xlarge", instances)]
    assert not plan.infeasible_gang_resource_requests


@pytest.mark.nightly
def test_two_processes_give_the_answers_of_one(assets: Path, tmp_path: Path) -> None:
    """vLLM 0.29 runs tensor parallel on CPUs. Pipeline parallel fails there: KeyError in `update_from_output`."""
    script = tmp_path / "answer.py"
    script.write_text(ANSWER)

    def answer(processes: int) -> str:
        command = [sys.executable, str(script), str(assets / "model"), str(processes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        [line] = [line for line in done.stdout.splitlines() if line.startswith("tokens")]
        return line

    assert answer(2) == answer(1)
