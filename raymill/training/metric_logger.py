"""Logs the metrics and events of a run on rank 0: to JSON Lines, TensorBoard, trackers, Ray and the console."""

import json
import math
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from raymill.training.history import EXPORT, Line, last_seen, lines
from raymill.training.options import TrainOptions
from raymill.training.ranking import Ranking
from raymill.training.runtimes.runtime import Metrics, Runtime
from raymill.training.storage import RunFolder
from raymill.training.trackers import Trackers


class MetricLogger:
    """Logs each step once, in order. A resumed run removes the steps after its checkpoint, because it repeats them.

    A line of metrics.jsonl holds step, time, loss, lr, grad_norm, tokens_per_s, memory_gib and, if known, mfu,
    eval_loss and eval_perplexity. The first line is for step 0, and holds an evaluation before the first step. Numbers
    that are not finite are left out, because JSON does not have them.

    A line of events.jsonl holds event, step and time. Events are `start` (with a description of the workers, and the
    metric that ranks checkpoints), `checkpoint` (with the seconds that training waited for it), `export` (with the step
    whose model was exported) and `end`. If a run did not end normally, its restart adds the event `broken off` with the
    last known step. Times are Unix seconds.
    """

    def __init__(self, folder: RunFolder, options: TrainOptions, runtime: Runtime, done: int, ranking: Ranking) -> None:
        self._last_step = options.last_step
        self._show = runtime.show_metrics
        self._metrics, self._events = folder.fetch("metrics.jsonl"), folder.fetch("events.jsonl")
        rows, events = _read(self._metrics), _read(self._events)
        self._exported = [event for event in events if event["event"] == EXPORT][-1:]
        if events and events[-1]["event"] not in ("end", EXPORT):
            last = last_seen(events, rows)
            events.append({"event": "broken off", "step": last["step"], "time": last["time"]})
        _write(self._metrics, (row for row in rows if done and row["step"] <= done))
        _write(self._events, events)
        self._board = SummaryWriter(folder.path / "tensorboard", purge_step=done and done + 1)
        if done < self._last_step:
            self._trackers = Trackers(options, folder)
            workers = {"world_size": runtime.world_size, "strategy": options.strategy}
            workers |= {"device": _name(runtime.device), "precision": options.precision}
            self._log_event("start", done, workers | {"best_metric": ranking.metric, "best_mode": ranking.mode})

    def write_start(self, evaluated: Metrics) -> None:
        """Log an evaluation before the first step."""
        _append(self._metrics, [{"step": 0, **_finite(evaluated), "time": time.time()}])
        self._send([{"step": 0, **evaluated}])
        print(f"before the first step: {_evaluation(evaluated)}", flush=True)

    def write(self, rows: list[Metrics], seconds_per_step: float) -> None:
        """Log the steps since the last call, and print a progress line."""
        now = time.time()
        times = (now - left * seconds_per_step for left in reversed(range(len(rows))))
        _append(self._metrics, (_finite(row) | {"time": at} for row, at in zip(rows, times, strict=True)))
        self._send(rows)
        self._show({name: value for row in rows for name, value in row.items()})  # not every row has an eval_loss
        print(progress_line(rows[-1], self._last_step, seconds_per_step), flush=True)

    def _send(self, rows: list[Metrics]) -> None:
        """Send metrics to TensorBoard and to trackers."""
        for row in rows:
            for name, value in row.items():
                self._board.add_scalar(name, value, int(row["step"]))
        self._board.flush()
        self._trackers.write(rows)

    def checkpoint(self, step: int, waited_s: float) -> None:
        """Log a checkpoint after `step`, and for how many seconds saving it delayed training."""
        self._log_event("checkpoint", step, {"waited_s": round(waited_s, 3)})
        if waited_s >= 1:
            print(f"training waited {waited_s:.0f} s to save the checkpoint after step {step}", flush=True)

    def export(self, step: int, stopped_early: bool) -> None:
        """Log which step's model was exported. If the same model is exported again, log nothing."""
        details = {"stopped_early": stopped_early}
        if not any({"step": step, **details}.items() <= event.items() for event in self._exported):
            self._log_event(EXPORT, step, details)

    def end(self, step: int) -> None:
        """Log that training ended normally after `step`."""
        self._log_event("end", step)
        self._trackers.end()

    def _log_event(self, event: str, step: int, details: dict[str, Any] | None = None) -> None:
        _append(self._events, [{"event": event, "step": step, "time": time.time()} | (details or {})])


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _finite(row: Metrics) -> Metrics:
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _read(file: Path) -> list[Line]:
    return list(lines(file.read_text(errors="replace"))) if file.exists() else []


def _write(file: Path, content: Iterable[Line]) -> None:
    """Replace a file atomically."""
    partial = file.with_name(f".{file.name}")
    partial.write_text("".join(json.dumps(line) + "\n" for line in content))
    partial.rename(file)


def _append(file: Path, content: Iterable[Line]) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.writelines(json.dumps(line) + "\n" for line in content)


def progress_line(row: Metrics, last_step: int, seconds_per_step: float) -> str:
    """Return a line with the metrics of a step and the time left."""
    left = timedelta(seconds=round((last_step - row["step"]) * seconds_per_step))
    parts = [
        f"step {row['step']:>{len(str(last_step))}}/{last_step}",
        f"loss {row['loss']:.4f}",
        f"lr {row['lr']:.2e}",
        f"{row['tokens_per_s']:,.0f} tokens/s",
    ]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    parts.append(f"{row['memory_gib']:.1f} GiB")
    parts.append(f"{left} left")
    if "eval_loss" in row:
        parts.append(_evaluation(row))
    return "  ".join(parts)


def _evaluation(row: Metrics) -> str:
    shown = {"eval_perplexity": ".2f", "eval_rewards/accuracies": ".1%"}
    more = [f"{name.removeprefix('eval_')} {row[name]:{form}}" for name, form in shown.items() if name in row]
    loss = f"{row['eval_loss']:.4f}" if "eval_loss" in row else "not finite"
    return ", ".join([f"evaluation loss {loss}", *more])
