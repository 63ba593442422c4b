"""Collects what the steps leave on the device, and reads it once for many steps: a read waits for the device."""

import math
import time

import torch
from transformers import PreTrainedModel

from jobs.training.arithmetic import flops_per_token, peak_flops
from jobs.training.options import TrainOptions
from jobs.training.ranks import total
from jobs.training.run import Metrics, Run
from settings import Refusal


class Meter:
    """Losses, gradient norms and speed of the steps since the last `restart`."""

    def __init__(self, options: TrainOptions, run: Run, model: PreTrainedModel, sequence_length: int) -> None:
        self._tokens_per_step = options.global_batch_rows * sequence_length
        self._peak_tokens_per_s = _peak_tokens_per_s(options, run, model, sequence_length)
        self.restart()

    def restart(self) -> None:
        """Forget the steps read, and start the clock again."""
        self._rows: list[Metrics] = []
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor | float] = []
        self._start = time.perf_counter()

    def add(self, step: int, lr: float, loss: torch.Tensor, grad_norm: torch.Tensor | float) -> None:
        """One step; `loss` is this rank's share of the mean over the trained tokens of the global batch."""
        self._rows.append({"step": step, "lr": lr})
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def read(self) -> list[Metrics]:
        """The steps since the last restart; every rank calls it.

        Raises:
            Refusal: a loss is not finite, on every rank alike.
        """
        losses = total(torch.stack(self._losses)).tolist()
        self.seconds_per_step = (time.perf_counter() - self._start) / len(losses)
        tokens_per_s = self._tokens_per_step / self.seconds_per_step
        for row, loss, norm in zip(self._rows, losses, self._norms, strict=True):
            _refuse_divergence(int(row["step"]), loss)
            row |= {"loss": loss, "grad_norm": float(norm), "tokens_per_s": tokens_per_s}
            if self._peak_tokens_per_s:
                row["mfu"] = tokens_per_s / self._peak_tokens_per_s
        return self._rows


def _peak_tokens_per_s(options: TrainOptions, run: Run, model: PreTrainedModel, sequence_length: int) -> float | None:
    """Tokens a second of all devices at their bf16 peak: MFU is the share of it that is reached (PaLM, appendix B)."""
    if options.precision != "bf16" or run.device.type != "cuda":
        return None
    if (peak := peak_flops(torch.cuda.get_device_name(run.device))) is None:
        return None
    multiplied = model.num_parameters() - model.get_input_embeddings().weight.numel()
    shape = model.config.num_hidden_layers, model.config.hidden_size, sequence_length
    frozen = max(0, multiplied - model.num_parameters(only_trainable=True))
    return run.world_size * peak / flops_per_token(multiplied, *shape, frozen=frozen)


def _refuse_divergence(step: int, loss: float) -> None:
    if not math.isfinite(loss):
        raise Refusal(
            f"the loss of step {step} is {loss}: training diverged and was stopped; start it over with a lower "
            f"--learning-rate or a longer --warmup-steps, and --fresh."
        )
