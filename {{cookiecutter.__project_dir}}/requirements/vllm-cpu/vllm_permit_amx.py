"""A vLLM plugin: lets the process that loads it use the matrix unit (AMX) of recent Intel CPUs."""

import torch


def register() -> None:
    """Ask the kernel for the AMX tile registers; without that, vLLM's bfloat16 kernels die of SIGILL.

    The permission belongs to one process, and vLLM loads its plugins in each of its own.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
