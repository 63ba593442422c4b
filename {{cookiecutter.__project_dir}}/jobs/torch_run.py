"""Runs the training loop under torchrun, without Ray: the workers' side of the Run port, and what each process does."""

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jobs import secrets
from jobs.training import preflight, storage
from jobs.training.arithmetic import plan_batches
from jobs.training.loop import train
from jobs.training.options import TrainOptions
from jobs.training.run import Metrics, OneProcess
from jobs.training.strategies import MakeStrategy
from settings import Refusal


class TorchRun(OneProcess):
    """The Run port in one of torchrun's processes; all of them see the run's folder."""

    def __init__(self, folder: Path, device: torch.device, keep_checkpoints: int) -> None:
        super().__init__(folder, device, keep_checkpoints)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model.to(self.device), gradient_as_bucket_view=True)

    def report(self, metrics: Metrics, checkpoint: Path) -> None:
        """The parts of all ranks come together in a folder that gets its name when it is whole."""
        partial = self._folder / f".step-{metrics['step']:08d}-partial"
        shutil.copytree(checkpoint, partial, dirs_exist_ok=True)
        dist.barrier()
        if self.rank == 0:
            super().report(metrics, partial)
        dist.barrier()


def fit(options: TrainOptions, make_strategy: MakeStrategy) -> None:
    """Train in this process, one of those that torchrun started; their number is num_workers.

    Raises:
        Refusal: something does not fit, or the loop refused to go on; on rank 0, the others just end.
    """
    secrets.load()
    dist.init_process_group(dist.get_default_backend_for_device(options.device))
    try:
        device = _device(options)
        options = preflight.with_absolute_paths(options).model_copy(update={"num_workers": dist.get_world_size()})
        _agree(_prepare(options) if dist.get_rank() == 0 else "")
        train(options, TorchRun(Path(options.output, options.name), device, options.keep_checkpoints), make_strategy)
    except Refusal:
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
            raise Refusal("under torchrun, rows come from preprocess and output is a folder that all processes see.")
        plan_batches(options.global_batch_rows, options.micro_batch_rows, options.num_workers)
        preflight.claim(options, preflight.check_packed(options))
    except Refusal as refusal:
        return str(refusal)
    return ""


def _agree(refusal: str) -> None:
    """All ranks refuse what rank 0 does, so that none waits for another."""
    answer = [refusal]
    dist.broadcast_object_list(answer)
    if answer[0]:
        raise Refusal(answer[0])
