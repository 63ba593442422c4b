"""The network check on two workers, and what it reads in NCCL's log."""

import sys

import pytest
import ray

import settings
from jobs import check_network
from jobs.check_network import NetworkOptions

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test


@pytest.mark.usefixtures("ray_session")
def test_two_workers_measure_their_network(capsys: pytest.CaptureFixture[str]) -> None:
    options = settings.load(NetworkOptions, "train", profile="local")
    check_network.main(options.model_copy(update={"message_mib": (1, 4)}))
    head, titles, *rows, last = capsys.readouterr().out.splitlines()
    assert head == "2 workers on 1 node, over TCP (gloo)"
    assert titles.split() == ["MiB", "ms", "GB/s", "(bus)"]
    assert [row.split()[0] for row in rows] == ["1", "4"]
    assert all(float(word) > 0 for row in rows for word in row.split())
    assert last.startswith("all workers are on one node")


@pytest.mark.parametrize(
    ("log", "carrier"),
    [
        ("NCCL INFO NET/OFI Selected provider is efa, fabric is efa\nNCCL INFO Using network AWS Libfabric", "EFA"),
        ("NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)", "EFA"),
        ("NCCL INFO NET/OFI Selected provider is tcp\nNCCL INFO Using network AWS Libfabric", "AWS Libfabric"),
        ("NCCL INFO NET/Plugin: No plugin found\nNCCL INFO Using network Socket", "Socket"),
        ("NCCL INFO comm 0x1 rank 0 nranks 2", "memory"),
    ],
)
def test_nccls_log_names_the_carrier(log: str, carrier: str) -> None:
    assert check_network.carrier_of(log) == carrier


def test_without_efa_between_nodes_it_says_so() -> None:
    assert "not over EFA" in check_network.verdict(2, "Socket", "cuda")
    assert check_network.verdict(2, "EFA", "cuda") == "gradients travel over EFA"


def test_bus_bandwidth_does_not_depend_on_the_number_of_ranks() -> None:
    link = 50e9  # a ring moves 2 (n - 1) / n of the message over each link
    for ranks in (2, 8, 16):
        seconds = 1e9 * 2 * (ranks - 1) / ranks / link
        assert check_network.bus_bandwidth(1e9, seconds, ranks) == pytest.approx(link)
