"""Runs the trainer under torchrun, without Ray: the `Runtime` in each process, and what each process does."""

import os
import shutil
import sys
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.ray_support import job_secrets
from pipeline.training import preflight, storage
from pipeline.training.options import TrainOptions
from pipeline.training.runtimes.runtime import Metrics, SingleProcess, Write
from pipeline.training.schedule import check_batches
from pipeline.training.strategies import MakeStrategy
from pipeline.training.trainer import train
from settings import UserError


class TorchrunRuntime(SingleProcess):
    """The `Runtime` interface in one of torchrun's processes; all of them see the run's folder."""

    def __init__(self, folder: Path, device: torch.device, keep_checkpoints: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # of the threads that write, beside what the loop says meanwhile
        self._writers = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        super().__init__(folder, device, keep_checkpoints)
        dist.barrier()  # all have deleted what a kill left

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model.to(self.device), gradient_as_bucket_view=True)

    def _keep(self, metrics: Metrics, write: Write) -> None:
        """Each rank writes a folder of its own; rank 0 makes one of them when all are whole."""
        partial = self._folder / f".step-{metrics['step']:08d}"
        own = partial / f"rank-{self.rank}"
        own.mkdir(parents=True)
        write(own)
        dist.barrier(self._writers)
        if self.rank == 0:
            for rank in range(self.world_size):
                shutil.copytree(partial / f"rank-{rank}", partial, copy_function=os.rename, dirs_exist_ok=True)
                shutil.rmtree(partial / f"rank-{rank}")
            self._publish(partial, metrics)


def fit(options: TrainOptions, make_strategy: MakeStrategy) -> None:
    """Train in this process, one of those that torchrun started; their number is num_workers.

    Raises:
        UserError: something does not fit, or the loop refused to go on; on rank 0, the others just end.
    """
    job_secrets.load()
    dist.init_process_group(dist.get_default_backend_for_device(options.device))
    try:
        device = _device(options)
        options = preflight.with_absolute_paths(options).model_copy(update={"num_workers": dist.get_world_size()})
        _agree(_prepare(options) if dist.get_rank() == 0 else "")
        train(
            options,
            TorchrunRuntime(Path(options.output, options.name), device, options.keep_checkpoints),
            make_strategy,
        )
    except UserError:
        if dist.get_rank() == 0:
            raise
        sys.exit(1)
    finally:
        dist.destroy_process_group()


def _device(options: TrainOptions) -> torch.device:
    if options.device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def _prepare(options: TrainOptions) -> str:
    """Check all that can be checked, and begin the run; returns what is refused."""
    try:
        if options.stream or not storage.is_local(options.output):
            raise UserError("under torchrun, rows come from preprocess and output is a folder that all processes see.")
        check_batches(options.global_batch_rows, options.micro_batch_rows, options.min_workers, options.max_workers)
        preflight.claim(options, preflight.check_packed(options) | {"launcher": "torchrun"})
    except UserError as error:
        return str(error)
    return ""


def _agree(message: str) -> None:
    """All ranks refuse what rank 0 does, so that none waits for another."""
    answer = [message]
    dist.broadcast_object_list(answer)
    if answer[0]:
        raise UserError(answer[0])
