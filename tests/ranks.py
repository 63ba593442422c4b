"""Starts the ranks of a gloo group, and has runtimes for them, with only the part of `Runtime` that strategies use."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

os.environ["DS_ACCELERATOR"] = "cpu"  # `import deepspeed` reads this variable
# imported once, by the process from which ranks are forked, because these imports take seconds
multiprocessing.set_forkserver_preload(["raymill.training.runtimes.torchrun", "raymill.training.fsdp", "deepspeed"])


def run(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Run `function(rank, *arguments)` in `count` processes. Raises an exception if it fails in one of them."""
    start_processes(function, arguments, count, start_method="forkserver")


class Alone:
    """One process."""

    world_size, local_world_size, rank, device = 1, 1, 0, torch.device("cpu")

    def wrap(self, model: nn.Module) -> nn.Module:
        return model


class Rank(Alone):
    """A rank of a gloo group. By default, all ranks are on one machine."""

    def __init__(self, rank: int, world_size: int, local_world_size: int | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.local_world_size = local_world_size or world_size

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


def join(rank: int, world_size: int, folder: Path) -> None:
    """Join a gloo group, whose ranks find each other through a file in `folder`."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)


def leave() -> None:
    """Leave the group. All ranks wait for each other, because some may still be connecting to this one."""
    distributed.barrier()
    distributed.destroy_process_group()
