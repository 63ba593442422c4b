"""Computes how likely the base model finds each packed document, once for all runs, and stores it with the rows."""

import hashlib
import io
import math
import time
import zipfile
from typing import Literal

import numpy as np
import torch

from raymill.training import objectives, preflight, storage, weights_check
from raymill.training.collectives import any_rank, largest, total
from raymill.training.dataset import PackedRows, read_manifest
from raymill.training.options import TrainOptions
from raymill.training.runtimes.runtime import Runtime
from raymill.training.strategy import Strategy

PROGRESS_INTERVAL_S = 10


def log_probabilities(
    strategy: Strategy, options: TrainOptions, runtime: Runtime, split: Literal["train", "eval"]
) -> np.ndarray:
    """Return the log-probability of each document's trained tokens, of shape (rows, documents), in fp32.

    The strategy must still hold the base model. A file in the folder of the rows is used if it was made with the same
    weights, rows and precision; otherwise rank 0 writes it. All ranks must call this.
    """
    location = _location(options, split)
    found = _read(location, len(PackedRows(options.data, split)))
    is_missing = any_rank(found is None, runtime.device)
    if found is None or is_missing:
        found = _compute(strategy, options, runtime, split)
        if runtime.rank == 0:
            buffer = io.BytesIO()
            np.savez(buffer, logps=found)  # with a checksum
            storage.replace_bytes(location, buffer.getvalue())  # trials of `tune` may write the same file at once
    return found


def _read(location: str, rows: int) -> np.ndarray | None:
    """Return the content of a file, or None if it does not exist or is damaged, for example by a kill."""
    content = storage.read_bytes(location)
    try:
        found = np.load(io.BytesIO(content or b""))["logps"]
    except (ValueError, OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile):  # also NotImplementedError
        return None
    return found if len(found) == rows else None


def _location(options: TrainOptions, split: str) -> str:
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
    return f"{options.data}/reference/{key}-{split}.npz"


@torch.no_grad()
def _compute(
    strategy: Strategy, options: TrainOptions, runtime: Runtime, split: Literal["train", "eval"]
) -> np.ndarray:
    rows, micro_rows, started = PackedRows(options.data, split), options.micro_batch_rows, time.monotonic()
    passes, found, shown = math.ceil(len(rows) / (micro_rows * runtime.world_size)), list[np.ndarray](), started
    strategy.module.eval()
    for number in range(passes):
        first = (number * runtime.world_size + runtime.rank) * micro_rows
        batch = {name: column.to(runtime.device) for name, column in rows.read(first, micro_rows).items()}
        own = strategy.in_precision(
            lambda batch=batch: objectives.document_logps(strategy.module, strategy.model, batch)
        )
        documents = int(largest(own.shape[1], runtime.device))
        all_ranks = own.new_zeros(runtime.world_size, micro_rows, documents)
        all_ranks[runtime.rank, :, : own.shape[1]] = own
        found.append(total(all_ranks).flatten(0, 1).float().cpu().numpy())
        if runtime.rank == 0 and time.monotonic() - shown > PROGRESS_INTERVAL_S:
            shown = time.monotonic()
            left = (shown - started) / (number + 1) * (passes - number - 1)
            print(
                f"log-probabilities of the base model: {number + 1:,} of {passes:,} passes, {left:.0f} s left",
                flush=True,
            )
    strategy.module.train()
    width = max((one.shape[1] for one in found), default=0)
    wide = [np.pad(one, ((0, 0), (0, width - one.shape[1]))) for one in found]
    return np.concatenate([np.zeros((0, width), np.float32), *wide])[: len(rows)]
