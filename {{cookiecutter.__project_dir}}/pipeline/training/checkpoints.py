"""Checkpoints: what of a run survives a kill, so that the steps after it come out as they would have."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

from pipeline.training.collectives import any_rank, total
from pipeline.training.runtimes.runtime import Metrics, Runtime
from pipeline.training.storage import is_local
from pipeline.training.strategies import Strategy
from settings import UserError

STATE = "state.json"


def save(strategy: Strategy, run: Runtime, row: Metrics, output: str) -> None:
    """Begin a checkpoint of all ranks: parameters, optimizer, random states, and the step, which is the position.

    They are copied now, and written while the loop trains on; a checkpoint that is still being written is waited for,
    as main memory holds one copy.

    Raises:
        UserError: there is no room for it, on every rank alike.
    """
    run.wait()
    refuse_full_disk(strategy, run, output)
    write_strategy, random = strategy.capture(), _random_state(run.device)
    state = {"step": row["step"], "world_size": run.world_size}

    def write(folder: Path) -> None:
        write_strategy(folder)
        torch.save(random, folder / f"random-{run.rank:05d}.pt")
        if run.rank == 0:
            (folder / STATE).write_text(json.dumps(state))
        (folder / _inventory(run.rank)).write_text(json.dumps(_sizes(folder)))

    run.report(row, write)


def restore(strategy: Strategy, run: Runtime) -> int:
    """Load the last checkpoint of the run that is whole; returns its step, 0 where there is none."""
    for folder in run.checkpoints():
        problem = _what_is_torn(folder)
        if any_rank(bool(problem), run.device):
            if run.rank == 0:
                print(f"the checkpoint {folder.name} is skipped, as it is not whole: {problem}", flush=True)
            continue
        state = json.loads((folder / STATE).read_text())
        strategy.load(folder, state["world_size"])
        _restore_random_state(folder / f"random-{run.rank:05d}.pt", run.device)
        return state["step"]
    return 0


def _inventory(rank: int) -> str:
    return f"files-{rank:05d}.json"


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file, by its path in `folder`."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def _what_is_torn(folder: Path) -> str:
    """The first file that is not as a rank wrote it; empty where all of all ranks are."""
    there = _sizes(folder)
    if STATE not in there:
        return f"{STATE} is missing"
    for rank in range(json.loads((folder / STATE).read_text())["world_size"]):
        if _inventory(rank) not in there:
            return f"{_inventory(rank)} is missing"
        for file, size in json.loads((folder / _inventory(rank)).read_text()).items():
            if there.get(file) != size:
                return f"{file} has {there.get(file, 0)} of {size} bytes"
    return ""


def refuse_full_disk(strategy: Strategy, run: Runtime, output: str) -> None:
    """Refuse before writing: a full disk in the middle of it would leave the ranks waiting for one another."""
    own = strategy.checkpoint_bytes()
    all_ranks = int(total(torch.tensor(own, device=run.device)))
    needs = {output: all_ranks} if is_local(output) else {}
    if run.scratch:
        needs[tempfile.gettempdir()] = own * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # those of this node
    disks = {place: os.stat(place).st_dev for place in needs}
    short = [
        f"{place} has {_free(place) >> 20} MiB left"
        for place, disk in disks.items()
        if _free(place) < sum(needs[other] for other in needs if disks[other] == disk)
    ]
    if any_rank(bool(short), run.device):
        where = " and ".join(short) or "the disk of another worker is full"
        raise UserError(
            f"no room for a checkpoint of {all_ranks >> 20} MiB: {where}; free some, then run the same command again "
            "to resume."
        )


def _free(place: str) -> int:
    return shutil.disk_usage(place).free


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Of the generators that dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _restore_random_state(file: Path, device: torch.device) -> None:
    if not file.exists():  # a rank that the checkpoint's run did not have
        return
    state = torch.load(file, weights_only=True)
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
