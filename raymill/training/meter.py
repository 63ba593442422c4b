"""Collects metrics on the device, and reads them once for many steps, because each read waits for the device."""

import math
import time

import psutil
import torch
from transformers import PreTrainedModel

from raymill.model_config import text_config
from raymill.training.collectives import total
from raymill.training.flops import compute_of, flops_per_token, peak_flops
from raymill.training.objectives import Objective
from raymill.training.options import TrainOptions
from raymill.training.runtimes.runtime import Metrics, Runtime


class Diverged(Exception):
    """The loss or the gradient of a step is not finite, or the loss is far too high."""

    def __init__(self, step: int, reason: str, micro_batches: list[int]) -> None:
        super().__init__(reason)
        self.step = step
        self.micro_batches = micro_batches
        """Numbers of the responsible micro-batches in the global batch, from 0. If all losses are finite: all."""


class Meter:
    """Losses, gradient norms and speed of the steps since the last `restart`."""

    def __init__(
        self,
        options: TrainOptions,
        runtime: Runtime,
        model: PreTrainedModel,
        sequence_length: int,
        *,
        objective: Objective,
        bounds_loss: bool,
    ) -> None:
        self._runtime = runtime
        self._objective = objective
        self._largest_loss = 2 * math.log(text_config(model.config).vocab_size) if bounds_loss else math.inf
        self._tokens_per_step = options.global_batch_rows * sequence_length
        self._peak_tokens_per_s = _peak_tokens_per_s(options, runtime, model, sequence_length)
        self.restart()

    def restart(self) -> None:
        """Discard the steps and restart the clock."""
        self._rows: list[Metrics] = []
        self._losses: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._start = time.perf_counter()

    def add(
        self, step: int, lr: float, sums: torch.Tensor, counts: torch.Tensor, grad_norm: torch.Tensor | float
    ) -> None:
        """Add one step.

        Args:
            sums: those of the objective for each micro-batch of this rank.
            counts: what they are divided by, over all ranks.
        """
        self._rows.append({"step": step, "lr": lr})
        self._losses.append(sums)
        self._counts.append(counts)
        self._norms.append(torch.as_tensor(grad_norm))

    def read(self) -> list[Metrics]:
        """Return the metrics of the steps since the last `restart`. All ranks must call this.

        Raises:
            Diverged: a loss or gradient is not finite, or a loss is more than twice that of a uniform guess. All ranks
                raise it.
        """
        shares = torch.stack(self._losses) / torch.stack(self._counts)[:, None]
        sums = torch.cat([shares.sum(1).flatten(), shares.new_tensor([self._seconds()])])
        *flat, seconds = total(sums).tolist()
        width = shares.shape[-1]
        values = [self._objective.named(flat[first : first + width]) for first in range(0, len(flat), width)]
        self.seconds_per_step = seconds / self._runtime.world_size / len(values)
        tokens_per_s = self._tokens_per_step / self.seconds_per_step
        memory = peak_memory(self._runtime.device) / 2**30
        for number, (row, named, norm) in enumerate(zip(self._rows, values, self._norms, strict=True)):
            row |= named | {"grad_norm": float(norm), "tokens_per_s": tokens_per_s, "memory_gib": memory}
            if self._peak_tokens_per_s:
                row["mfu"] = tokens_per_s / self._peak_tokens_per_s
            self._refuse_divergence(row, shares[number])
        return self._rows

    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _refuse_divergence(self, row: Metrics, shares: torch.Tensor) -> None:
        """Raise `Diverged` if a number is not finite, or the loss is above twice that of a uniform guess."""
        if not math.isfinite(row["loss"]):
            reason = f"the loss is {row['loss']}"
        elif row["loss"] > self._largest_loss:
            reason = f"the loss is {row['loss']:.1f}, more than twice the loss of random guessing"
        elif not math.isfinite(row["grad_norm"]):
            reason = f"the gradient norm is {row['grad_norm']}"
        else:
            return
        broken = torch.zeros(self._runtime.world_size, len(shares), device=shares.device)
        broken[self._runtime.rank] = ~shares.isfinite().all(-1)
        micro_batches = total(broken).flatten().nonzero().flatten().tolist()
        raise Diverged(int(row["step"]), reason, micro_batches or list(range(broken.numel())))


def peak_memory(device: torch.device) -> int:
    """Return the peak of this rank's GPU memory in bytes or, on a CPU, the current memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return psutil.Process().memory_info().rss


def _peak_tokens_per_s(
    options: TrainOptions, runtime: Runtime, model: PreTrainedModel, sequence_length: int
) -> float | None:
    """Return how many tokens per second all GPUs could process at their bf16 peak.

    None: the precision is not bf16, or the peak is unknown. MFU is the measured speed divided by this one (PaLM,
    appendix B).
    """
    if options.precision != "bf16" or runtime.device.type != "cuda":
        return None
    if (peak := peak_flops(torch.cuda.get_device_name(runtime.device))) is None:
        return None
    return runtime.world_size * peak / flops_per_token(compute_of(model), sequence_length)
