"""Estimate how many GPUs it takes to serve a model, and on which instance type. Sizes are in bytes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raymill.instance_types import InstanceType
from raymill.planner.memory import GIB, USABLE
from raymill.planner.shape import Shape

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

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def kv_bytes(shape: Shape, width: int) -> int:
    """Return the size of one token's keys and values in all layers (Kwon et al. 2023, arXiv:2309.06180, section 3)."""
    return 2 * shape.layers * shape.key * width


def serve(shape: Shape, width: int, context: int, gpu_gib: float) -> Serving | None:
    """Return how to serve a model on the fewest GPUs that hold its weights and the keys and values of `context` tokens.

    Returns None if no split over up to 128 GPUs fits. `width` is the number of bytes of a weight, and of an element of
    keys and values. Tensor parallelism splits each layer and its heads over the GPUs of an instance; pipeline
    parallelism distributes the layers over instances (vLLM's documentation, "Parallelism and Scaling").
    """
    spreads = [(tensor, 1) for tensor in (1, 2, 4, 8)] + [(8, stages) for stages in (2, 4, 8, 16)]
    for tensor, stages in spreads:
        gpus = tensor * stages
        each = width * (shape.parameters + shape.untrained) / gpus
        cache_tokens = int(gpus * ((USABLE * gpu_gib - SERVING_GIB) * GIB - each) / kv_bytes(shape, width))
        if shape.heads % tensor == 0 and stages <= shape.layers and cache_tokens >= context:
            return Serving(tensor, stages, each, cache_tokens)
    return None


def smallest(
    shape: Shape, width: int, context: int, cpus: float, types: Iterable[InstanceType]
) -> dict[InstanceType, Serving]:
    """Return how to serve a model on the smallest of the `types` with each model of GPU.

    An instance must have `cpus` CPUs for a replica, all GPUs that share a layer, and main memory for its weights. Among
    types with the same GPU, smaller ones come first.
    """
    found: dict[InstanceType, Serving] = {}
    for one in types:
        serving = serve(shape, width, context, one.gpu.gib)
        if serving is None or one.gpu in {other.gpu for other in found}:
            continue
        weights = serving.weights * serving.tensor_parallel_size
        if one.gpus >= serving.tensor_parallel_size and one.vcpus >= cpus and one.memory_gib * GIB >= weights:
            found[one] = serving
    return found


def cheapest(found: Mapping[InstanceType, Serving], dollars: Mapping[str, float]) -> InstanceType | None:
    """Return the type with the lowest price for a replica or, without prices, that with the least GPU memory.

    `dollars` maps the name of a type to the hourly price of an instance. Types without a price come last.
    """

    def cost(one: InstanceType) -> tuple[float, float]:
        instances = one.instances(found[one].gpus)
        return instances * dollars.get(one.name, math.inf), instances * one.gpus * one.gpu.mib

    return min(found, key=cost, default=None)
