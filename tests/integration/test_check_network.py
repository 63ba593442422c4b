"""Test the network check with two workers, and that a training run over TCP ends where EFA is expected."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

from jobs import check_network, train_classifier
from raymill import settings
from raymill.errors import UserError
from raymill.network import free_ports
from raymill.ray_support import network_check
from raymill.ray_support.network_check import Network, NetworkMeasurement
from raymill.training import transport
from raymill.training.ddp import DDP
from raymill.training.options import ClassifierOptions, DDPOptions, NetworkOptions
from raymill.training.runtimes import ray_train, torchrun

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_session")
def test_two_workers_measure_their_network(capsys: pytest.CaptureFixture[str]) -> None:
    options = settings.load(NetworkOptions, "train", "check_network", profile="local")
    check_network.main(options.model_copy(update={"message_mib": (1, 4)}))
    printed = capsys.readouterr().out.splitlines()
    # at any time, Ray may print a warning about processes that earlier tests left idle
    head, titles, *rows, last = [line for line in printed if "(raylet)" not in line]
    assert head == "2 workers on 1 node, over TCP (gloo)"
    assert titles.split() == ["MiB", "ms", "GB/s", "(bus)"]
    assert [row.split()[0] for row in rows] == ["1", "4"]
    assert all(float(word) > 0 for row in rows for word in row.split())
    assert last.startswith("all workers are on one node")


def network(name: str, machine: str, gigabytes_per_s: float) -> Network:
    """Return a network between two nodes, with the bandwidth of the largest messages."""
    measured = [NetworkMeasurement(1, 0.001, 1.0), NetworkMeasurement(256, 0.01, gigabytes_per_s)]
    return Network(2, name, machine, measured)


def test_the_verdict_says_whether_efa_is_used() -> None:
    verdict = network_check.verdict(network("Socket", "p4d.24xlarge", 5), "cuda")
    assert "over Socket. EFA is several times faster" in verdict
    assert network_check.verdict(network("EFA", "a server", 40), "cuda") == "gradients travel over EFA"


def test_the_verdict_compares_the_bandwidth_with_that_of_the_machine() -> None:
    fast = network_check.verdict(network("EFA", "p4d.24xlarge", 40), "cuda")
    assert fast == "gradients travel over EFA, at 80% of the 50 GB/s of p4d.24xlarge"
    slow = network_check.verdict(network("EFA", "p4d.24xlarge", 10), "cuda")
    assert "at 20% of the 50 GB/s of p4d.24xlarge, but at least 50% are usual" in slow
    assert "--message-mib 1024" in slow


def test_bus_bandwidth_does_not_depend_on_the_number_of_ranks() -> None:
    link = 50e9  # a ring all-reduce moves 2 (n - 1) / n of the message over each link
    for ranks in (2, 8, 16):
        seconds = 1e9 * 2 * (ranks - 1) / ranks / link
        assert network_check.bus_bandwidth(1e9, seconds, ranks) == pytest.approx(link)


def test_a_run_that_would_use_tcp_by_accident_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class TwoMachines:
        device, world_size, local_world_size = torch.device("cuda"), 16, 8

    (tmp_path / "product_name").write_text("p5.48xlarge")
    (tmp_path / "log").write_text("NCCL INFO Using network Socket")
    monkeypatch.setattr(transport, "PRODUCT_NAME", tmp_path / "product_name")
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/log")
    monkeypatch.setattr(transport, "any_rank", lambda *_: False)
    monkeypatch.setattr(ray_train, "RayTrainRuntime", lambda _: TwoMachines())
    monkeypatch.setattr(ray_train, "train", lambda *_: pytest.fail("the run started"))
    options = settings.load(DDPOptions, "train", profile="cluster").model_copy(update={"output": str(tmp_path)})
    monkeypatch.setattr(ray, "get", lambda _: (options, DDP, None))
    failure = ray_train._train_worker({"arguments": None})
    assert failure
    assert failure.startswith("p5.48xlarge has EFA, but NCCL would send gradients over Socket")


@pytest.mark.usefixtures("ray_session")
def test_workers_with_gpus_write_nccls_log() -> None:
    options = settings.load(DDPOptions, "train", profile="cluster")
    for device, variables in (("cuda", transport.LOG_VARIABLES), ("cpu", {})):
        chosen = options.model_copy(update={"device": device})
        trainer = ray_train._torch_trainer(chosen, DDP, None, ScalingConfig(num_workers=1))
        assert trainer.run_config.worker_runtime_env.get("env_vars", {}) == variables


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has EFA, but NCCL does not use it."""

    def refuse(device: torch.device, world_size: int, local_world_size: int) -> None:
        raise UserError("NCCL would send gradients over Socket")

    monkeypatch.setattr(transport, "require_efa", refuse)


@pytest.mark.usefixtures("tcp")
def test_the_classifier_does_not_train_over_tcp_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"get_world_rank": 0, "get_world_size": 16, "get_local_world_size": 8}
    context = SimpleNamespace(**{name: lambda size=size: size for name, size in sizes.items()})
    options = settings.load(ClassifierOptions, "train", "classifier", profile="local")
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(train_classifier, "make_model", lambda: pytest.fail("the run started"))
    failure = train_classifier.train(options)
    assert failure == "NCCL would send gradients over Socket"
    monkeypatch.setattr(TorchTrainer, "fit", lambda _: SimpleNamespace(return_value=failure))
    monkeypatch.setattr(train_classifier, "connect", lambda: None)
    monkeypatch.setattr(train_classifier.ray_logging, "driver", lambda: None)
    monkeypatch.setattr(train_classifier.capacity, "refuse_too_many_workers", lambda *_: None)
    monkeypatch.setattr(train_classifier.capacity, "refuse_private_paths", lambda *_: None)
    with pytest.raises(UserError, match="NCCL would send gradients over Socket"):
        train_classifier.main(options)


@pytest.mark.usefixtures("tcp")
def test_a_run_under_torchrun_does_not_use_tcp_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    rank = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in rank.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torchrun, "_prepare", lambda _: pytest.fail("the run started"))
    options = settings.load(DDPOptions, "train", profile="local")
    with pytest.raises(UserError, match="NCCL would send gradients over Socket"):
        torchrun.fit(options, DDP)
