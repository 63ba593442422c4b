"""Runs the trainer under torchrun, without Ray."""

import os
import shutil
import socket
import sys
import uuid
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raymill import code_identity, output_lease
from raymill.errors import UserError
from raymill.output_lease import Holder, Lease, NoLease
from raymill.state_files import DamagedFile
from raymill.training import preflight, storage, transport
from raymill.training.options import TrainOptions
from raymill.training.runtimes.runtime import Metrics, SingleProcess, WriteCheckpoint
from raymill.training.schedule import check_batches
from raymill.training.strategy import MakeStrategy
from raymill.training.trainer import train

TIMEOUT_MINUTES = 30
"""How long ranks wait for each other, as in Ray Train. NCCL's default of 10 minutes may be too short while one rank
converts a large checkpoint."""


class TorchrunRuntime(SingleProcess):
    """The `Runtime` of one of torchrun's processes. All processes must be able to write to the run's folder."""

    def __init__(self, folder: Path, device: torch.device, keep_checkpoints: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        # the threads that write checkpoints need a separate process group
        self._writers = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        super().__init__(folder, device, keep_checkpoints)
        dist.barrier()  # wait until all ranks have deleted incomplete checkpoints

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model.to(self.device), gradient_as_bucket_view=True)

    def _keep(self, metrics: Metrics, write: WriteCheckpoint) -> None:
        """Write this rank's folder. When the folders of all ranks are complete, rank 0 merges them."""
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
    """Train in this process, which torchrun started. torchrun's number of processes replaces num_workers.

    Raises:
        UserError: options, data and model do not match, or training failed. Rank 0 raises it, and any rank that finds
            a damaged file; the others exit.
    """
    if options.device == "cuda":
        os.environ |= transport.LOG_VARIABLES  # before NCCL starts
    backend = dist.get_default_backend_for_device(options.device)
    dist.init_process_group(backend, timeout=timedelta(minutes=TIMEOUT_MINUTES))
    try:
        device = _device(options)
        transport.require_efa(device, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
        options = preflight.with_absolute_paths(options).model_copy(update={"num_workers": dist.get_world_size()})
        options = preflight.with_steps(options)
        with ExitStack() as held:
            _raise_on_all_ranks(_prepare(options, held, make_strategy) if dist.get_rank() == 0 else "")
            runtime = TorchrunRuntime(Path(options.output, options.name), device, options.keep_checkpoints)
            train(options, runtime, make_strategy)
    except UserError as error:
        if dist.get_rank() == 0 or isinstance(error, DamagedFile):
            raise
        sys.exit(1)
    finally:
        dist.destroy_process_group()


def _device(options: TrainOptions) -> torch.device:
    if options.device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def _prepare(options: TrainOptions, held: ExitStack, make_strategy: MakeStrategy) -> str:
    """Check options, data and model, and create the run's folder. Return the error, or an empty string.

    `held` gets the lease on the folder.
    """
    try:
        if options.stream or not storage.is_local(options.output):
            raise UserError(
                "under torchrun, jobs read preprocessed rows and write to a folder that all processes share. "
                "Leave out --stream, and set --output to a folder."
            )
        check_batches(options.global_batch_rows, options.micro_batch_rows, options.min_workers, options.max_workers)
        identity = preflight.check_packed(options, make_strategy.make_objective(options))
        identity |= {"launcher": "torchrun"} | code_identity.identify(make_strategy)
        held.enter_context(_lease(f"{options.output}/{options.name}"))
        preflight.claim(options, identity)
    except UserError as error:
        return str(error)
    return ""


def _lease(folder: str) -> AbstractContextManager[Lease | NoLease]:
    """Hold the lease on the run's folder. torchrun ends all processes before it starts them again."""
    host = socket.gethostname()
    launcher = f"torchrun {os.environ['TORCHELASTIC_RUN_ID']}, process {os.getppid()} on {host}"
    me = Holder(cluster=launcher, job="", name=f"process {os.getpid()} on {host}", token=uuid.uuid4().hex)
    return output_lease.hold(folder, "--name", me, lambda holder: True)


def _raise_on_all_ranks(error: str) -> None:
    """Raise rank 0's error on all ranks, so that no rank waits for rank 0."""
    errors = [error]
    dist.broadcast_object_list(errors)
    if errors[0]:
        raise UserError(errors[0])
