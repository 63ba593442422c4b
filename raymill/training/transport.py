"""Finds out which network NCCL uses between machines, and refuses to train over TCP by accident.

If AWS's plugin for EFA does not load, or an instance has no EFA interface, NCCL uses TCP without an error. EFA needs no
environment variables: the plugin, aws-ofi-nccl, is in the image and sets what it needs itself
(github.com/aws/aws-ofi-nccl, src/platform-aws.cpp; github.com/aws-samples/awsome-distributed-training,
1.architectures/efa-cheatsheet.md, on versions since 1.7.0).
"""

import os
import re
import tempfile
from pathlib import Path

import torch

from raymill import settings
from raymill.errors import UserError
from raymill.instance_types import INSTANCE_TYPES
from raymill.ray_support.aws_sections import NetworkSection
from raymill.settings import inv
from raymill.training.collectives import any_rank

EFA = "EFA"
LOG_VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tempfile.gettempdir()}/nccl.%p.log"}
"""Environment variables with which a process that uses NCCL must start. NCCL replaces %p with the process id."""
PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
"""On AWS, this file contains the instance type. aws-ofi-nccl reads it, too (src/nccl_ofi_system.cpp)."""


def require_efa(device: torch.device, world_size: int, local_world_size: int) -> None:
    """Refuse to train over TCP between machines that have EFA, unless the settings allow it.

    All ranks raise the error, because NCCL cannot connect ranks that use different networks. Their processes must have
    started with LOG_VARIABLES.

    Raises:
        UserError: NCCL does not use EFA.
    """
    if device.type != "cuda" or world_size == local_world_size:
        return
    any_rank(False, device)  # the first collective makes NCCL choose a network
    log, name = read_log(), machine()
    may_use_tcp = not settings.load(NetworkSection, "network", profile="cluster").efa
    if name in INSTANCE_TYPES and INSTANCE_TYPES[name].efa_cards and not may_use_tcp and find(log) != EFA:
        raise UserError(
            f"{name} has EFA, but NCCL would send gradients over {find(log)}, which is several times slower "
            f"({_cause(log)}). Run: {inv('prepare')}, and start the job on new machines. To train over TCP, "
            "set efa = false in [cluster.network] of settings.toml"
        )


def machine() -> str:
    """Return this machine's instance type, another name if it is not on AWS, or "" if it has none."""
    return PRODUCT_NAME.read_text().strip() if PRODUCT_NAME.exists() else ""


def read_log() -> str:
    """Return what NCCL has logged in this process so far, and delete the file."""
    file = Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())))
    text = file.read_text(errors="replace")
    file.unlink()
    return text


def find(log: str) -> str:
    """Return the network in NCCL's log, such as "EFA" or "Socket" (TCP), or "memory" if NCCL uses none.

    With EFA, NCCL names the library, and the plugin names the provider. The plugin may still fail after that.
    """
    networks = re.findall(r"Using network (.+)", log)
    if not networks:
        return "memory"
    network = networks[-1].strip()
    has_efa = re.search(r"selected provider is efa", log, re.IGNORECASE)
    return EFA if has_efa and network.endswith("Libfabric") else network


def _cause(log: str) -> str:
    """Return NCCL's first warning, or else what it says about its plugin."""
    found = re.search(r"NCCL WARN (.+)", log) or re.search(r"NCCL INFO (NET/Plugin: .+)", log)
    return f"NCCL: {found[1].strip()}" if found else "NCCL gives no reason"
