"""Configures PyTorch's allocator of GPU memory for training."""

import os

import torch

USERS_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with which users configure the allocator."""


def use_expandable_segments(device: torch.device) -> None:
    """Let PyTorch extend memory that it has already reserved, so that less of it stays unused.

    Only training processes do this, because vLLM shares GPU memory between processes, and cannot share such segments.

    Does nothing on the CPU, and if the user has configured the allocator. torch 2.13 cannot allocate such segments if
    the driver does not say whether the GPU belongs to an NVLink fabric (pytorch#186375). In that case, print a note and
    use ordinary segments.
    """
    if device.type != "cuda" or os.environ.keys() & set(USERS_SETTINGS):
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        reason = str(error).partition("\n")[0]
        print(f"note: training uses no expandable segments, because this GPU refuses them ({reason})", flush=True)
