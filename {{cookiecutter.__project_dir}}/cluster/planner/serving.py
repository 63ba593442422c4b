"""Estimate how many GPUs it takes to serve a model. Sizes are in bytes."""

from dataclasses import dataclass

from cluster.planner.memory import GIB, USABLE
from cluster.planner.shape import Shape

SERVING_GIB = 2  # per GPU, for vLLM's activations and CUDA graphs


@dataclass(frozen=True)
class Serving:
    """How a served model is distributed over GPUs."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    weights: float
    """Bytes per GPU."""
    cache_tokens: int
    """Number of tokens whose keys and values fit on all GPUs together."""


def kv_bytes(shape: Shape, width: int) -> int:
    """Return the size of one token's keys and values in all layers (Kwon et al. 2023, arXiv:2309.06180, section 3)."""
    return 2 * shape.layers * shape.key * width


def serve(shape: Shape, width: int, context: int, gpu_gib: int) -> Serving | None:
    """Return how to serve a model on the fewest GPUs that hold its weights and the keys and values of `context` tokens.

    Returns None if no split over up to 128 GPUs fits. `width` is the number of bytes of a weight, and of an element of
    keys and values. Tensor parallelism splits each layer and its heads over the GPUs of an instance; pipeline
    parallelism distributes the layers over instances (vLLM's documentation, "Parallelism and Scaling").
    """
    spreads = [(tensor, 1) for tensor in (1, 2, 4, 8)] + [(8, stages) for stages in (2, 4, 8, 16)]
    for tensor, stages in spreads:
        gpus = tensor * stages
        each = width * shape.parameters / gpus
        cache_tokens = int(gpus * ((USABLE * gpu_gib - SERVING_GIB) * GIB - each) / kv_bytes(shape, width))
        if shape.heads % tensor == 0 and stages <= shape.layers and cache_tokens >= context:
            return Serving(tensor, stages, each, cache_tokens)
    return None
