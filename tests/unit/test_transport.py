"""Test which network NCCL's log names, and that training does not use TCP by accident. The logs are from AWS."""

from pathlib import Path
from typing import Any

import pytest
import torch

from raymill import settings
from raymill.errors import UserError
from raymill.ray_support.aws_sections import NetworkSection
from raymill.training import transport

EFA = """\
ip-10-0-10-221:78499:78499 [0] NCCL INFO NCCL version 2.29.2+cuda12.8
ip-10-0-10-221:78499:78499 [0] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v11)
ip-10-0-10-221:78499:78499 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.18.0
ip-10-0-10-221:78499:78499 [0] NCCL INFO NET/OFI Using transport protocol SENDRECV (platform set)
ip-10-0-10-221:78499:78499 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 1 nics)
ip-10-0-10-221:78499:78499 [0] NCCL INFO Initialized NET plugin Libfabric
ip-10-0-10-221:78499:78499 [0] NCCL INFO Assigned NET plugin Libfabric to comm
ip-10-0-10-221:78499:78499 [0] NCCL INFO Using network Libfabric
"""
WITHOUT_INTERFACE = """\
ip-172-31-3-153:35113:35467 [0] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v10)
ip-172-31-3-153:35113:35467 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.17.1
ip-172-31-3-153:35113:35467 [0] NCCL INFO NET/OFI Setting provider_filter to efa

[2026-01-02 10:24:27] ip-172-31-3-153:35113:35467 [0] int nccl_net_ofi_create_plugin(nccl_net_ofi_plugin_t**):208 \
NCCL WARN NET/OFI Failed to initialize sendrecv protocol

[2026-01-02 10:24:27] ip-172-31-3-153:35113:35467 [0] int nccl_net_ofi_create_plugin(nccl_net_ofi_plugin_t**):353 \
NCCL WARN NET/OFI aws-ofi-nccl initialization failed
ip-172-31-3-153:35113:35467 [0] NCCL INFO NET/Socket : Using [0]ens32:172.31.3.153<0>
ip-172-31-3-153:35113:35467 [0] NCCL INFO Initialized NET plugin Socket
ip-172-31-3-153:35113:35467 [0] NCCL INFO Using network Socket
"""
WITHOUT_PLUGIN = """\
node:880:887 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
node:880:887 [0] NCCL INFO NET/IB : No device found.
node:880:887 [0] NCCL INFO NET/Socket : Using [0]ens32:172.31.3.153<0>
node:880:887 [0] NCCL INFO Using network Socket
"""


@pytest.mark.parametrize(
    ("log", "network"),
    [
        (EFA, "EFA"),
        (EFA.replace("network Libfabric", "network AWS Libfabric"), "EFA"),  # the plugin's earlier name
        (EFA.replace("is efa, fabric is efa", "is tcp, fabric is 172.31.0.0/20"), "Libfabric"),
        (EFA + WITHOUT_INTERFACE, "Socket"),  # the plugin failed after it had selected a provider
        (WITHOUT_INTERFACE, "Socket"),
        (WITHOUT_PLUGIN, "Socket"),
        ("node:880:887 [0] NCCL INFO comm 0x1 rank 0 nranks 2", "memory"),
    ],
)
def test_the_log_names_the_network(log: str, network: str) -> None:
    assert transport.find(log) == network


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the instance type. NCCL's log says that it uses TCP."""
    monkeypatch.setattr(transport, "any_rank", lambda *_: False)  # there is no GPU
    monkeypatch.setattr(transport, "read_log", lambda: WITHOUT_INTERFACE)
    monkeypatch.setattr(transport, "PRODUCT_NAME", tmp_path / "product_name")
    transport.PRODUCT_NAME.write_text("p4d.24xlarge\n")
    return transport.PRODUCT_NAME


def check(world_size: int = 16, device: str = "cuda") -> None:
    """Check the network as a rank on a machine with 8 ranks."""
    transport.require_efa(torch.device(device), world_size, 8)


@pytest.mark.usefixtures("machine")
def test_tcp_between_machines_with_efa_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INV_TARGET", "aws")
    with pytest.raises(UserError) as refused:
        check()
    text = str(refused.value)
    assert "p4d.24xlarge has EFA, but NCCL would send gradients over Socket" in text
    assert "(NCCL: NET/OFI Failed to initialize sendrecv protocol)" in text
    assert "Run: inv prepare --target aws" in text


@pytest.mark.usefixtures("machine")
def test_a_missing_plugin_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "read_log", lambda: WITHOUT_PLUGIN)
    with pytest.raises(UserError, match=r"\(NCCL: NET/Plugin: Could not find: libnccl-net.so\)"):
        check()


@pytest.mark.usefixtures("machine")
def test_efa_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "read_log", lambda: EFA)
    check()


@pytest.mark.usefixtures("machine")
def test_the_settings_can_allow_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "load", lambda *_, **__: NetworkSection(efa=False))
    check()


@pytest.mark.parametrize("name", ["g6.xlarge", "Standard PC (i440FX + PIIX, 1996)"])
def test_machines_without_efa_may_use_tcp(machine: Path, name: str) -> None:
    machine.write_text(name)
    check()
    machine.unlink()
    check()


@pytest.mark.parametrize("ranks", [{"world_size": 8}, {"device": "cpu"}], ids=["one machine", "CPU"])
@pytest.mark.usefixtures("machine")
def test_without_gpus_on_several_machines_nothing_is_checked(
    ranks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "read_log", lambda: pytest.fail("NCCL has no log"))
    check(**ranks)
