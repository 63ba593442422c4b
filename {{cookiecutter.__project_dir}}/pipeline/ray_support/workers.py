"""The workers of a training, as settings.toml describes them in [train]: what runs on the same workers reads it too."""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

import settings


class WorkerOptions(settings.Section):
    """How many workers there are, and what each has."""

    num_workers: PositiveInt | tuple[PositiveInt, PositiveInt]
    """Processes that take part, one device each; [MIN, MAX]: as many of them as there is room for at any time."""
    use_gpu: bool
    """Reserve one GPU for each worker."""
    device: Literal["cpu", "cuda"]
    """Where the workers compute; `cpu` with use_gpu rehearses a GPU cluster without its cards."""
    cpus_per_worker: PositiveInt
    """Logical CPUs reserved for each worker, and its number of torch threads."""
    zone_timeout_s: PositiveFloat = 900
    """Seconds after which a zone without room for all workers is given up for the next."""

    @model_validator(mode="after")
    def _cuda_is_reserved(self) -> Self:
        if self.device == "cuda" and not self.use_gpu:
            raise ValueError("device = cuda needs use_gpu = true; set both, or device = cpu")
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError("num_workers = [MIN, MAX] has the smaller number first")
        return self

    @property
    def min_workers(self) -> int:
        """The fewest workers that go on."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        """The most workers that there ever are."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def worker_resources(self) -> dict[str, float]:
        """What Ray reserves for each worker."""
        return {"CPU": float(self.cpus_per_worker)} | ({"GPU": 1.0} if self.use_gpu else {})
