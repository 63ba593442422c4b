"""Options for the workers of a training run. All training jobs share this part of [train]."""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from raymill import settings


class WorkerOptions(settings.Section):
    """Number and resources of the workers."""

    num_workers: PositiveInt | tuple[PositiveInt, PositiveInt]
    """Number of worker processes, each with one device. [MIN, MAX]: as many in this range as the cluster can hold."""
    use_gpu: bool
    """Reserve one GPU for each worker."""
    device: Literal["cpu", "cuda"]
    """Device on which the workers compute. `cpu` with use_gpu emulates a GPU cluster on CPUs."""
    cpus_per_worker: PositiveInt
    """Number of logical CPUs reserved for each worker. The worker runs as many torch threads."""
    zone_timeout_s: PositiveFloat = 900
    """Seconds to wait until AWS has started the machines of all workers in one zone, before trying the next."""

    @model_validator(mode="after")
    def _cuda_is_reserved(self) -> Self:
        if self.device == "cuda" and not self.use_gpu:
            raise ValueError("device = cuda needs use_gpu = true; set both, or device = cpu")
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError("num_workers = [MIN, MAX] needs the smaller number first")
        return self

    @property
    def min_workers(self) -> int:
        """Minimum number of workers."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        """Maximum number of workers."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def worker_resources(self) -> dict[str, float]:
        """Resources that Ray reserves for each worker."""
        return {"CPU": float(self.cpus_per_worker)} | ({"GPU": 1.0} if self.use_gpu else {})
