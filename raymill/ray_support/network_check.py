"""Times all-reduces between the workers of a training run, and finds out which network they use."""

import tempfile
import time
from typing import Any, NamedTuple

import ray.train
import torch
import torch.distributed
from ray.train import LoggingConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from raymill.instance_types import INSTANCE_TYPES
from raymill.ray_support import gang
from raymill.training import transport
from raymill.training.options import NetworkOptions

ROUNDS = 10
MIB = 2**20
EXPECTED_SHARE = 0.5
"""Large all-reduces over EFA reach at least this share of the network's bandwidth. With two machines, NCCL's trees may
exceed it, because the bus bandwidth assumes a ring."""


class NetworkMeasurement(NamedTuple):
    """The result for one message size, on rank 0."""

    mib: int
    seconds: float
    """Average duration of one all-reduce."""
    gigabytes_per_s: float
    """Bus bandwidth (see `bus_bandwidth`)."""


class Network(NamedTuple):
    """What connects the workers, as rank 0 sees it."""

    nodes: int
    name: str
    """Such as "EFA" (see `transport.find`)."""
    machine: str
    """Instance type, or another name of the machine, or ""."""
    measurements: list[NetworkMeasurement]


def measure(options: NetworkOptions) -> Network:
    """Run the measurement on all workers."""
    trainer = TorchTrainer(
        _measure_on_worker,
        train_loop_config={"device": options.device, "message_mib": options.message_mib},
        torch_config=TorchConfig(backend=torch.distributed.get_default_backend_for_device(options.device)),
        scaling_config=gang.scaling(options),
        run_config=RunConfig(
            name="check_network",
            storage_path=tempfile.mkdtemp(),  # required by Ray Train, although nothing is stored
            logging_config=LoggingConfig(log_level="WARNING"),
            worker_runtime_env={"env_vars": transport.LOG_VARIABLES},
        ),
    )
    return trainer.fit().return_value


def verdict(network: Network, device: str) -> str:
    """Return sentences that say what the network means for a training run."""
    if network.nodes == 1:
        return "all workers are on one node, so there is no network between them; use a larger --num-workers"
    if device == "cuda" and network.name != transport.EFA:
        return f"gradients travel over {network.name}. EFA is several times faster: see docs/aws.md"
    return f"gradients travel over {network.name}{_comparison(network)}"


def _comparison(network: Network) -> str:
    """Compare the best bandwidth with that of the instance type. Return "" for other machines."""
    if network.machine not in INSTANCE_TYPES:
        return ""
    largest = max(network.measurements)
    possible = INSTANCE_TYPES[network.machine].gbit_per_s / 8
    share = max(one.gigabytes_per_s for one in network.measurements) / possible
    text = f", at {share:.0%} of the {possible:g} GB/s of {network.machine}"
    if share >= EXPECTED_SHARE:
        return text
    return (
        f"{text}, but at least {EXPECTED_SHARE:.0%} are usual. Run again: inv submit check_network --target aws -- "
        f"--message-mib {4 * largest.mib}. If it stays slow, start the job on new machines"
    )


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce of `size` bytes, in bytes per second.

    It shows the speed of the slowest link, independently of the number of ranks. Formula from nccl-tests,
    doc/PERFORMANCE.md: size / time x 2 (n - 1) / n.
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def _measure_on_worker(config: dict[str, Any]) -> Network:
    """Measure in one worker. `fit` returns the result of rank 0."""
    device = torch.device("cpu") if config["device"] == "cpu" else get_device()
    measurements = [_measure(mib, device) for mib in config["message_mib"]]
    context = ray.train.get_context()
    nodes = context.get_world_size() // context.get_local_world_size()
    name = "TCP (gloo)" if device.type == "cpu" else transport.find(transport.read_log())
    return Network(nodes, name, transport.machine(), measurements)


def _measure(mib: int, device: torch.device) -> NetworkMeasurement:
    message = torch.zeros(mib * MIB // 4, dtype=torch.float32, device=device)
    _all_reduce(message)  # the first call connects the ranks
    started = time.perf_counter()
    for _ in range(ROUNDS):
        _all_reduce(message)
    seconds = (time.perf_counter() - started) / ROUNDS
    bandwidth = bus_bandwidth(mib * MIB, seconds, torch.distributed.get_world_size())
    return NetworkMeasurement(mib, seconds, bandwidth / 1e9)


def _all_reduce(message: torch.Tensor) -> None:
    """Run an all-reduce and wait until it ends, because it is asynchronous on a GPU."""
    torch.distributed.all_reduce(message)
    if message.is_cuda:
        torch.cuda.synchronize()
