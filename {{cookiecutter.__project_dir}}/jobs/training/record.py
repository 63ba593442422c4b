"""What a person or a plot reads of a run: metrics.jsonl, TensorBoard events and progress lines, on rank 0."""

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from jobs.training.run import Metrics
from jobs.training.storage import RunFolder


class Record:
    """Each step once, in order: a resumed run forgets the steps after its checkpoint, which it makes again.

    A line of metrics.jsonl holds step, loss, lr, grad_norm, tokens_per_s, and where known mfu, eval_loss and
    eval_perplexity.
    """

    def __init__(self, folder: RunFolder, done: int, last_step: int) -> None:
        self._file = folder.fetch("metrics.jsonl")
        self._last_step = last_step
        self._file.write_text(
            "".join(json.dumps(row) + "\n" for row in _earlier_rows(self._file) if row["step"] <= done)
        )
        self._board = SummaryWriter(folder.path / "tensorboard", purge_step=done + 1)

    def write(self, rows: list[Metrics], seconds_per_step: float) -> None:
        """Append the steps since the last call, and say how far the run is."""
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        for row in rows:
            for name, value in row.items():
                self._board.add_scalar(name, value, int(row["step"]))
        self._board.flush()
        print(progress_line(rows[-1], self._last_step, seconds_per_step), flush=True)


def _earlier_rows(file: Path) -> Iterator[Metrics]:
    """What an earlier start wrote; a kill may have cut its last line short."""
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def progress_line(row: Metrics, last_step: int, seconds_per_step: float) -> str:
    """How far, how good, how fast, how long still."""
    left = timedelta(seconds=round((last_step - row["step"]) * seconds_per_step))
    parts = [
        f"step {row['step']:>{len(str(last_step))}}/{last_step}",
        f"loss {row['loss']:.4f}",
        f"lr {row['lr']:.2e}",
        f"{row['tokens_per_s']:,.0f} tokens/s",
    ]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    parts.append(f"{left} left")
    if "eval_loss" in row:
        parts.append(f"evaluation loss {row['eval_loss']:.4f}, perplexity {row['eval_perplexity']:.2f}")
    return "  ".join(parts)
