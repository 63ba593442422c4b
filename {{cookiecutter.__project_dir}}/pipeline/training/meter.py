"""Collects what the steps leave on the device, and reads it once for many steps: a read waits for the device."""

import math
import time

import psutil
import torch
from transformers import PreTrainedModel

from pipeline.training.collectives import total
from pipeline.training.flops import flops_per_token, peak_flops
from pipeline.training.options import TrainOptions
from pipeline.training.runtimes.runtime import Metrics, Runtime


class Diverged(Exception):
    """A step after which training on is of no use."""

    def __init__(self, step: int, what: str, micro_batches: list[int]) -> None:
        super().__init__(what)
        self.step = step
        self.micro_batches = micro_batches
        """Those of the step's global batch, counted from 0, that made it."""


class Meter:
    """Losses, gradient norms and speed of the steps since the last `restart`."""

    def __init__(self, options: TrainOptions, run: Runtime, model: PreTrainedModel, sequence_length: int) -> None:
        self._run = run
        self._largest_loss = 2 * math.log(model.config.vocab_size)
        self._tokens_per_step = options.global_batch_rows * sequence_length
        self._peak_tokens_per_s = _peak_tokens_per_s(options, run, model, sequence_length)
        self.restart()

    def restart(self) -> None:
        """Forget the steps read, and start the clock again."""
        self._rows: list[Metrics] = []
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._start = time.perf_counter()

    def add(self, step: int, lr: float, losses: torch.Tensor, grad_norm: torch.Tensor | float) -> None:
        """One step; `losses` are the shares of this rank's micro-batches in the mean over the trained tokens of the
        global batch."""
        self._rows.append({"step": step, "lr": lr})
        self._losses.append(losses)
        self._norms.append(torch.as_tensor(grad_norm))

    def read(self) -> list[Metrics]:
        """The steps since the last restart; every rank calls it.

        Raises:
            Diverged: a loss or a gradient is not finite, or a loss is more than twice that of guessing, on every rank
                alike.
        """
        shares = torch.stack(self._losses)
        sums = torch.cat([shares.sum(1), shares.new_tensor([self._seconds()])])
        *losses, seconds = total(sums).tolist()
        self.seconds_per_step = seconds / self._run.world_size / len(losses)
        tokens_per_s = self._tokens_per_step / self.seconds_per_step
        memory = _memory(self._run.device) / 2**30
        for number, (row, loss, norm) in enumerate(zip(self._rows, losses, self._norms, strict=True)):
            row |= {"loss": loss, "grad_norm": float(norm), "tokens_per_s": tokens_per_s, "memory_gib": memory}
            if self._peak_tokens_per_s:
                row["mfu"] = tokens_per_s / self._peak_tokens_per_s
            self._refuse_divergence(row, shares[number])
        return self._rows

    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _refuse_divergence(self, row: Metrics, shares: torch.Tensor) -> None:
        """Guessing costs ln(vocabulary); a model that is twice as bad has lost what it knew."""
        if not math.isfinite(row["loss"]):
            what = f"the loss is {row['loss']}"
        elif row["loss"] > self._largest_loss:
            what = f"the loss is {row['loss']:.1f}, twice that of guessing"
        elif not math.isfinite(row["grad_norm"]):
            what = f"the gradient's norm is {row['grad_norm']}"
        else:
            return
        broken = torch.zeros(self._run.world_size, len(shares), device=shares.device)
        broken[self._run.rank] = ~shares.isfinite()
        micro_batches = total(broken).flatten().nonzero().flatten().tolist()
        raise Diverged(int(row["step"]), what, micro_batches or list(range(broken.numel())))


def _memory(device: torch.device) -> int:
    """Bytes: the most that this rank had on its GPU, or on a CPU what its process has now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return psutil.Process().memory_info().rss


def _peak_tokens_per_s(
    options: TrainOptions, run: Runtime, model: PreTrainedModel, sequence_length: int
) -> float | None:
    """Tokens a second of all devices at their bf16 peak: MFU is the share of it that is reached (PaLM, appendix B)."""
    if options.precision != "bf16" or run.device.type != "cuda":
        return None
    if (peak := peak_flops(torch.cuda.get_device_name(run.device))) is None:
        return None
    multiplied = model.num_parameters() - model.get_input_embeddings().weight.numel()
    shape = model.config.num_hidden_layers, model.config.hidden_size, sequence_length
    frozen = max(0, multiplied - model.num_parameters(only_trainable=True))
    return run.world_size * peak / flops_per_token(multiplied, *shape, frozen=frozen)
