"""Configures PyTorch's allocator of GPU memory for training."""

import os


def variables(device: str) -> dict[str, str]:
    """Return the environment variables that a training process needs before it first uses CUDA.

    With expandable segments, PyTorch extends memory that it has already reserved, so less of it stays unused. Only
    training processes get the variables, because vLLM shares GPU memory between processes, and cannot share such
    segments.

    Empty on the CPU, and if the user has configured the allocator.
    """
    if device != "cuda" or {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
