"""Checkpoints: what of a run survives a kill, so that the steps after it come out as they would have."""

import json
import shutil
import tempfile
from pathlib import Path

import torch

from jobs.training.ranks import any_rank, total
from jobs.training.run import Metrics, Run
from jobs.training.storage import is_local
from jobs.training.strategies import Strategy
from settings import Refusal


def save(strategy: Strategy, run: Run, row: Metrics, output: str) -> None:
    """Report a checkpoint of all ranks: parameters, optimizer, random states, and the step, which is the position.

    Raises:
        Refusal: there is no room for it, on every rank alike.
    """
    refuse_full_disk(strategy, run, output)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    try:
        strategy.save(folder)
        torch.save(_random_state(run.device), folder / f"random-{run.rank:05d}.pt")
        if run.rank == 0:
            state = {"step": row["step"], "world_size": run.world_size}
            (folder / "state.json").write_text(json.dumps(state))
        run.report(row, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def restore(strategy: Strategy, run: Run) -> int:
    """Load the last checkpoint of the run; returns its step, 0 where there is none."""
    with run.resume_from() as folder:
        if folder is None:
            return 0
        state = json.loads((folder / "state.json").read_text())
        strategy.load(folder, state["world_size"])
        _restore_random_state(folder / f"random-{run.rank:05d}.pt", run.device)
        return state["step"]


def refuse_full_disk(strategy: Strategy, run: Run, output: str) -> None:
    """Refuse before writing: a full disk in the middle of it would leave the ranks waiting for one another."""
    own = strategy.checkpoint_bytes()
    all_ranks = int(total(torch.tensor(own, device=run.device)))
    needs = {tempfile.gettempdir(): own} | ({output: all_ranks} if is_local(output) else {})
    short = [f"{place} has {_free(place) >> 20} MiB left" for place, need in needs.items() if _free(place) < need]
    if any_rank(bool(short), run.device):
        where = " and ".join(short) or "the disk of another worker is full"
        raise Refusal(
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
