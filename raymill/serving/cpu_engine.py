"""Lets vLLM's engine compute in its own process on a CPU, as it does on one GPU.

vLLM would start one more process to bind the engine's threads to cores. That process imports vLLM a third time, which
takes eight CPU seconds and 0.5 GiB.
"""

import os
from collections.abc import Mapping
from typing import Any

EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""vLLM's executor for one process. On CPUs, vLLM 0.29 replaces its short name, `uni`, by `mp`."""


def set_threads(arguments: Mapping[str, Any]) -> None:
    """If an engine with these arguments uses `EXECUTOR`, set its number of threads as vLLM would, one less than cores.

    The engine is a process that this process starts later.
    """
    if arguments.get("distributed_executor_backend") != EXECUTOR:
        return
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list  # imported late, because only replicas import vLLM

    cores = {(cpu.numa_node, cpu.physical_core) for cpu in get_allowed_cpu_list()}
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(cores) - 1))
