"""Configures PyTorch's allocator of GPU memory for training."""

import os


def variables(device: str) -> dict[str, str]:
    """Return the environment variables that a training process must have before it first uses CUDA.

    With expandable segments, PyTorch extends a piece of reserved memory when a tensor does not fit into it, and reserves
    less memory that it cannot use. Only training processes get the variables: vLLM shares GPU memory between processes
    in ways that such segments do not allow.

    Empty on the CPU, and if the user has configured the allocator.
    """
    if device != "cuda" or {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
