"""Times all-reduces between the workers of a training run, and finds out which network they use."""

import tempfile
import time
from typing import Any, NamedTuple

import ray.train
import torch
import torch.distributed
from ray.train import LoggingConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from pipeline.ray_support import gang
from pipeline.training import transport
from pipeline.training.options import NetworkOptions

ROUNDS = 10
MIB = 2**20


class NetworkMeasurement(NamedTuple):
    """The result for one message size, on rank 0."""

    mib: int
    seconds: float
    """Average duration of one all-reduce."""
    gigabytes_per_s: float
    """Bus bandwidth (see `bus_bandwidth`)."""


def measure(options: NetworkOptions) -> tuple[int, str, list[NetworkMeasurement]]:
    """Run the measurement on all workers. Return the number of nodes, the network, and the measurements."""
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


def verdict(nodes: int, network: str, device: str) -> str:
    """Return a sentence that says what the network means for a training run."""
    if nodes == 1:
        return "all workers are on one node, so there is no network between them; use a larger --num-workers"
    if device == "cuda" and network != transport.EFA:
        return f"gradients travel over {network}. EFA is several times faster: see docs/aws.md"
    return f"gradients travel over {network}"


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce of `size` bytes, in bytes per second.

    It shows the speed of the slowest link, independently of the number of ranks. Formula from nccl-tests,
    doc/PERFORMANCE.md: size / time x 2 (n - 1) / n.
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def _measure_on_worker(config: dict[str, Any]) -> tuple[int, str, list[NetworkMeasurement]]:
    """Measure in one worker. `fit` returns the result of rank 0."""
    device = torch.device("cpu") if config["device"] == "cpu" else get_device()
    measurements = [_measure(mib, device) for mib in config["message_mib"]]
    context = ray.train.get_context()
    nodes = context.get_world_size() // context.get_local_world_size()
    return nodes, "TCP (gloo)" if device.type == "cpu" else transport.find(transport.read_log()), measurements


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
