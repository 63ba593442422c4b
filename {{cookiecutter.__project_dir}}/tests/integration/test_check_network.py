"""Test the network check with two workers, and how it reads NCCL's log."""

import sys

import pytest
import ray

import settings
from jobs import check_network
from pipeline.ray_support import network_check
from pipeline.training.options import NetworkOptions

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules


@pytest.mark.usefixtures("ray_session")
def test_two_workers_measure_their_network(capsys: pytest.CaptureFixture[str]) -> None:
    options = settings.load(NetworkOptions, "train", profile="local")
    check_network.main(options.model_copy(update={"message_mib": (1, 4)}))
    printed = capsys.readouterr().out.splitlines()
    # at any time, Ray may print a warning about processes that earlier tests left idle
    head, titles, *rows, last = [line for line in printed if "(raylet)" not in line]
    assert head == "2 workers on 1 node, over TCP (gloo)"
    assert titles.split() == ["MiB", "ms", "GB/s", "(bus)"]
    assert [row.split()[0] for row in rows] == ["1", "4"]
    assert all(float(word) > 0 for row in rows for word in row.split())
    assert last.startswith("all workers are on one node")


@pytest.mark.parametrize(
    ("log", "transport"),
    [
        ("NCCL INFO NET/OFI Selected provider is efa, fabric is efa\nNCCL INFO Using network AWS Libfabric", "EFA"),
        ("NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)", "EFA"),
        ("NCCL INFO NET/OFI Selected provider is tcp\nNCCL INFO Using network AWS Libfabric", "AWS Libfabric"),
        ("NCCL INFO NET/Plugin: No plugin found\nNCCL INFO Using network Socket", "Socket"),
        ("NCCL INFO comm 0x1 rank 0 nranks 2", "memory"),
    ],
)
def test_the_transport_is_read_from_nccls_log(log: str, transport: str) -> None:
    assert network_check.transport_of(log) == transport


def test_the_verdict_says_whether_efa_is_used() -> None:
    assert "over Socket. EFA is several times faster" in network_check.verdict(2, "Socket", "cuda")
    assert network_check.verdict(2, "EFA", "cuda") == "gradients travel over EFA"


def test_bus_bandwidth_does_not_depend_on_the_number_of_ranks() -> None:
    link = 50e9  # a ring all-reduce moves 2 (n - 1) / n of the message over each link
    for ranks in (2, 8, 16):
        seconds = 1e9 * 2 * (ranks - 1) / ranks / link
        assert network_check.bus_bandwidth(1e9, seconds, ranks) == pytest.approx(link)
