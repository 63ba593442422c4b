"""Computes how likely the base model finds each packed document, once for all runs, and stores it with the rows."""

import hashlib
import io
import time
import zipfile
from typing import Literal

import numpy as np
import torch

from raymill.training import objectives, preflight, storage, weights_check
from raymill.training.collectives import any_rank, largest, total
from raymill.training.dataset import Batch, PackedRows, read_manifest
from raymill.training.options import TrainOptions
from raymill.training.runtimes.runtime import Runtime
from raymill.training.strategy import Strategy

PROGRESS_INTERVAL_S = 10
SECTION_ROWS = 4096
"""Rows in a file. After a kill, a run computes at most this many rows again."""


def log_probabilities(
    strategy: Strategy, options: TrainOptions, runtime: Runtime, split: Literal["train", "eval"]
) -> np.ndarray:
    """Return the log-probability of each document's trained tokens, of shape (rows, views, documents), in fp32.

    The views are those of the strategy's objective. The strategy must still hold the base model. Files in the folder of
    the rows are used if they were made with the same weights, rows and precision; otherwise rank 0 writes them. All
    ranks must call this.
    """
    rows, progress = PackedRows(options.data, split), _Progress(runtime, split)
    location, found = _location(options, split), list[np.ndarray]()
    for first in range(0, len(rows), SECTION_ROWS):
        section = range(first, min(first + SECTION_ROWS, len(rows)))
        file = f"{location}-{first:08d}.npz"
        values = _read(file, len(section))
        if any_rank(values is None, runtime.device):
            values = _compute(strategy, options, runtime, rows, section, progress)
            if runtime.rank == 0:
                _write(file, values)
        assert values is not None
        found.append(values)
    return _joined(found)


def _write(file: str, values: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, logps=values)  # with a checksum
    storage.replace_bytes(file, buffer.getvalue())  # trials of `tune` may write the same file at once


def _read(file: str, rows: int) -> np.ndarray | None:
    """Return the content of a file, or None if it does not exist or is damaged, for example by a kill."""
    content = storage.read_bytes(file)
    try:
        found = np.load(io.BytesIO(content or b""))["logps"]
    except (ValueError, OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile):  # also NotImplementedError
        return None
    return found if len(found) == rows else None


def _location(options: TrainOptions, split: str) -> str:
    """Return the beginning of the paths of the files."""
    made_with = (
        weights_check.fingerprint(options.model),
        read_manifest(options.data).content_hash,
        options.precision,
        str(options.quantize_base),
        # the same weights give other numbers in another strategy's formats, and with another configuration
        f"{options.strategy} {options.device} {bool(options.lora_rank)}",
        preflight.config_hash(preflight.load_config(options.model)),
    )
    key = hashlib.sha256("\n".join(made_with).encode()).hexdigest()[:16]
    return f"{options.data}/reference/{key}-{split}"


@torch.no_grad()
def _compute(
    strategy: Strategy,
    options: TrainOptions,
    runtime: Runtime,
    rows: PackedRows,
    section: range,
    progress: "_Progress",
) -> np.ndarray:
    """Return the values of some rows."""
    micro_rows, found = options.micro_batch_rows, list[np.ndarray]()
    strategy.module.eval()
    for start in range(section.start, section.stop, micro_rows * runtime.world_size):
        first = start + runtime.rank * micro_rows
        batch = {name: column.to(runtime.device) for name, column in rows.read(first, micro_rows).items()}
        own = torch.stack([_logps(strategy, view) for view in strategy.objective.views(batch)], dim=1)
        documents = int(largest(own.shape[2], runtime.device))
        all_ranks = own.new_zeros(runtime.world_size, micro_rows, own.shape[1], documents)
        all_ranks[runtime.rank, :, :, : own.shape[2]] = own
        found.append(total(all_ranks).flatten(0, 1).float().cpu().numpy())
        progress.show(min(start + micro_rows * runtime.world_size, section.stop), len(rows))
    strategy.module.train()
    return _joined(found)[: len(section)]


def _logps(strategy: Strategy, batch: Batch) -> torch.Tensor:
    return strategy.in_precision(lambda: objectives.document_logps(strategy.module, strategy.model, batch))


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Return arrays of shape (rows, views, documents) as one, with zeros where one has fewer documents."""
    if not parts:
        return np.zeros((0, 1, 0), np.float32)
    width = max(one.shape[2] for one in parts)
    return np.concatenate([np.pad(one, ((0, 0), (0, 0), (0, width - one.shape[2]))) for one in parts])


class _Progress:
    """Prints on rank 0 how far the computation is, every PROGRESS_INTERVAL_S seconds."""

    def __init__(self, runtime: Runtime, split: str) -> None:
        self._is_shown = runtime.rank == 0
        self._what = f"log-probabilities of the base model, {split} rows"
        self._started: tuple[int, float] | None = None
        self._shown = 0.0

    def show(self, done: int, rows: int) -> None:
        now = time.monotonic()
        if self._started is None:
            self._started, self._shown = (done, now), now
        first, started = self._started
        if self._is_shown and done > first and now - self._shown > PROGRESS_INTERVAL_S:
            self._shown = now
            rate = (done - first) / (now - started)
            left = (rows - done) / rate
            print(f"{self._what}: {done:,} of {rows:,}, {rate:,.0f} rows/s, {left:,.0f} s left", flush=True)
