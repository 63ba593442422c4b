"""Measures the network between the workers of a training, before an expensive one starts: all-reduce bandwidth by
message size, and whether EFA carries it."""

from pipeline.ray_support import cli
from pipeline.training.options import NetworkOptions

if __name__ == "__main__":
    cli.parse(NetworkOptions, "train")  # before the imports below, which take seconds

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import ray.train
import torch
import torch.distributed
from ray.train import LoggingConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from pipeline.ray_support import capacity, gang

ROUNDS = 10
LOG = f"{tempfile.gettempdir()}/check-network-nccl.%p.log"  # NCCL puts the process's number in the place of %p
MIB = 2**20


class Measure(NamedTuple):
    """One message size, seen by rank 0."""

    mib: int
    seconds: float
    """Of one all-reduce, on average."""
    gigabytes_per_s: float
    """Bus bandwidth (see `bus_bandwidth`)."""


def main(options: NetworkOptions) -> None:
    """Measure the network between a training's workers."""
    cli.connect()
    options = options.model_copy(update={"num_workers": options.max_workers})
    capacity.refuse_too_many_workers(options.max_workers, options.worker_resources)
    trainer = TorchTrainer(
        _work,
        train_loop_config={"device": options.device, "message_mib": options.message_mib},
        torch_config=TorchConfig(backend=torch.distributed.get_default_backend_for_device(options.device)),
        scaling_config=gang.scaling(options),
        run_config=RunConfig(
            name="check_network",
            storage_path=tempfile.mkdtemp(),  # nothing is stored
            logging_config=LoggingConfig(log_level="WARNING"),
            worker_runtime_env={"env_vars": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": LOG}},
        ),
    )
    nodes, carrier, measures = trainer.fit().return_value
    print(f"{options.max_workers} workers on {nodes} node{'s' * (nodes > 1)}, over {carrier}", flush=True)
    print("   MiB        ms   GB/s (bus)")
    for measure in measures:
        print(f"{measure.mib:>6} {1000 * measure.seconds:>9.2f} {measure.gigabytes_per_s:>12.2f}")
    print(verdict(nodes, carrier, options.device), flush=True)


def verdict(nodes: int, carrier: str, device: str) -> str:
    """What the carrier means for a training."""
    if nodes == 1:
        return "all workers are on one node: no network is between them; measure it with a larger --num-workers"
    if device == "cuda" and carrier != "EFA":
        return f"gradients travel over {carrier} and not over EFA, which is several times faster: docs/aws-variants.md"
    return f"gradients travel over {carrier}"


def carrier_of(log: str) -> str:
    """What NCCL says in its log that it sends by: "EFA", "Socket" (TCP), "IB"; without a network, "memory"."""
    if re.search(r"selected provider is efa", log, re.IGNORECASE):
        return "EFA"
    networks = re.findall(r"Using network (.+)", log)
    return networks[-1].strip() if networks else "memory"


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """Bytes per second that an all-reduce of `size` bytes moves on the slowest link, whatever the number of ranks.

    Source: nccl-tests, doc/PERFORMANCE.md: size / time x 2 (n - 1) / n.
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def _work(config: dict[str, Any]) -> tuple[int, str, list[Measure]]:
    """What each worker runs; rank 0's answer counts."""
    device = torch.device("cpu") if config["device"] == "cpu" else get_device()
    measures = [_measure(mib, device) for mib in config["message_mib"]]
    context = ray.train.get_context()
    nodes = context.get_world_size() // context.get_local_world_size()
    return nodes, "TCP (gloo)" if device.type == "cpu" else carrier_of(_own_log()), measures


def _own_log() -> str:
    file = Path(LOG.replace("%p", str(os.getpid())))
    text = file.read_text(errors="replace")
    file.unlink()
    return text


def _measure(mib: int, device: torch.device) -> Measure:
    message = torch.zeros(mib * MIB // 4, dtype=torch.float32, device=device)
    _all_reduce(message)  # the first one makes the connections
    started = time.perf_counter()
    for _ in range(ROUNDS):
        _all_reduce(message)
    seconds = (time.perf_counter() - started) / ROUNDS
    return Measure(mib, seconds, bus_bandwidth(mib * MIB, seconds, torch.distributed.get_world_size()) / 1e9)


def _all_reduce(message: torch.Tensor) -> None:
    """To its end: a GPU answers before it is done."""
    torch.distributed.all_reduce(message)
    if message.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    cli.run(main)
