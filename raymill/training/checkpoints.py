"""Saves and restores everything that a run needs to resume bit for bit."""

import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import torch

from raymill.errors import UserError
from raymill.training import checkpoint_check, storage
from raymill.training.checkpoint_check import State
from raymill.training.collectives import any_rank, largest, total
from raymill.training.ranking import Best
from raymill.training.runtimes.runtime import Metrics, Runtime
from raymill.training.strategy import Strategy

GIB = 2**30
LARGE = GIB
"""Checkpoints of fewer bytes are stored within seconds."""
SAMPLE = 64 * 2**20
"""Bytes that each rank stores to estimate how long a checkpoint takes."""


def save(strategy: Strategy, runtime: Runtime, row: Metrics, output: str, best: Best | None) -> None:
    """Start saving a checkpoint of all ranks: parameters, optimizer state, random state, step and `best`.

    The call copies the state, which is then written in the background. It first waits for the previous checkpoint,
    because main memory has room for only one copy. If the strategy does not copy its state (see
    `Strategy.copies_state`), the call returns after the state is written.

    Raises:
        UserError: a disk has no room for the checkpoint. All ranks raise it.
    """
    runtime.wait()
    refuse_full_disk(strategy, runtime, output)
    write_strategy, numbers = strategy.capture(), random_state(runtime.device)
    state = State(step=int(row["step"]), world_size=runtime.world_size, best=best)

    def write(folder: Path) -> None:
        write_strategy(folder)
        torch.save(numbers, folder / f"random-{runtime.rank:05d}.pt")
        checkpoint_check.seal(folder, runtime.rank, state)

    runtime.report(row, write)
    if not strategy.copies_state:
        runtime.wait()


def restore(strategy: Strategy, runtime: Runtime) -> State | None:
    """Load the newest complete checkpoint. Return its state, or None if there is none."""
    for folder, state in complete(runtime):
        strategy.load(folder, state.world_size)
        _restore_random_state(folder / f"random-{runtime.rank:05d}.pt", runtime.device)
        return state
    return None


def load(strategy: Strategy, runtime: Runtime, step: int) -> bool:
    """Load the parameters of the checkpoint of a step. Return False if it is missing or damaged."""
    for folder, state in complete(runtime, step):
        strategy.load(folder, state.world_size)
        return True
    return False


def complete(runtime: Runtime, step: int | None = None) -> Generator[tuple[Path, State], None, None]:
    """Yield the folders and states of the complete checkpoints, newest first. All ranks yield the same ones.

    A folder exists until the next one is asked for, or the iterator is closed.

    Args:
        step: the only step whose checkpoints to yield. None: all steps.
    """
    for folder in runtime.checkpoints(step):
        state = checkpoint_check.read_state(folder)
        problem = checkpoint_check.first_problem(folder, runtime.rank, runtime.world_size)
        if any_rank(bool(problem), runtime.device) or state is None:
            if runtime.rank == 0:
                reason = problem or "another worker found a damaged file"
                print(f"skipping the incomplete checkpoint {folder.name}: {reason}", flush=True)
            continue
        yield folder, state


def announce(strategy: Strategy, runtime: Runtime, run_folder: str) -> None:
    """If checkpoints are large, print their size and about how many seconds it takes to store one.

    Each rank that takes part stores a sample where it stores its part of a checkpoint. The slowest rank counts.

    Args:
        run_folder: the path or URI of the run's folder.
    """
    own, all_ranks = _bytes(strategy, runtime)
    if all_ranks < LARGE:
        return
    seconds = _store_sample(runtime, run_folder) * own / SAMPLE if own else 0.0
    slowest = largest(seconds, runtime.device)
    if runtime.rank == 0:
        print(
            f"a checkpoint has {all_ranks / GIB:,.1f} GiB and takes about {slowest:,.0f} s to store, estimated by "
            f"storing {SAMPLE >> 20} MiB per worker",
            flush=True,
        )


def _store_sample(runtime: Runtime, run_folder: str) -> float:
    """Store and delete SAMPLE bytes. Return how many seconds storing them took."""
    sample, content = f"{run_folder}/.sample-{runtime.rank:05d}", os.urandom(SAMPLE)
    started = time.monotonic()
    if runtime.scratch:
        with tempfile.TemporaryFile() as file:
            file.write(content)
    storage.write_bytes(sample, content)
    seconds = time.monotonic() - started
    storage.delete_file(sample)
    return seconds


def _bytes(strategy: Strategy, runtime: Runtime) -> tuple[int, int]:
    """Return the sizes of this rank's part of a checkpoint and of all parts, in bytes."""
    own = strategy.checkpoint_bytes()
    return own, int(total(torch.tensor(own, device=runtime.device)))


def refuse_full_disk(strategy: Strategy, runtime: Runtime, output: str) -> None:
    """Refuse a checkpoint that does not fit on the disk. If one rank failed to write, the others would wait for it."""
    own, all_ranks = _bytes(strategy, runtime)
    needs = {output: all_ranks} if storage.is_local(output) else {}
    if runtime.scratch:
        needs[tempfile.gettempdir()] = own * runtime.local_world_size  # all ranks of this node
    disks = {folder: os.stat(folder).st_dev for folder in needs}
    short = [
        f"{folder} has {_free(folder) >> 20} MiB left"
        for folder, disk in disks.items()
        if _free(folder) < sum(needs[other] for other in needs if disks[other] == disk)
    ]
    if any_rank(bool(short), runtime.device):
        where = " and ".join(short) or "the disk of another worker is full"
        raise UserError(
            f"no room for a checkpoint of {all_ranks >> 20} MiB: {where}. Free some space, then run the same command "
            "again to resume."
        )


def _free(folder: str) -> int:
    return shutil.disk_usage(folder).free


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of the random generators that dropout uses."""
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _restore_random_state(file: Path, device: torch.device) -> None:
    if not file.exists():  # the checkpoint was saved by fewer ranks
        return
    state = torch.load(file, weights_only=True)
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
