"""DeepSpeed's ZeRO over the same loop."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from jobs.training.arithmetic import BatchPlan
from jobs.training.options import DeepSpeedOptions
from jobs.training.packed import Batch
from jobs.training.run import Run
from jobs.training.strategies import Strategy, adamw


def fill_config(config: dict[str, Any], options: DeepSpeedOptions, plan: BatchPlan) -> dict[str, Any]:
    """DeepSpeed's config with the values that settings.toml decides; the rest stands in the JSON file.

    No "auto": only the Hugging Face Trainer fills that in.
    """
    on_gpu = options.device == "cuda"
    zero = config["zero_optimization"] | {"stage": options.zero_stage, "overlap_comm": on_gpu}
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    if options.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
    return config | {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": options.micro_batch_rows,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": options.max_grad_norm,
        "bf16": {"enabled": options.precision == "bf16"},
    }


class ZeRO(Strategy):
    """Optimizer states, then gradients, then parameters sharded over the ranks (Rajbhandari et al. 2019,
    arXiv:1910.02054): stages 1, 2 and 3."""

    any_world_size = False

    def __init__(
        self,
        config: dict[str, Any],
        model: PreTrainedModel,
        options: DeepSpeedOptions,
        run: Run,
        plan: BatchPlan,
    ) -> None:
        self.model = model
        self.optimizer = adamw(model, options.weight_decay)
        self.module = self._engine = _initialize(
            model, self.optimizer, fill_config(config, options, plan), run.device.type
        )
        self._world_size = run.world_size
        self._is_writer = run.rank == 0

    def accumulate(self, batch: Batch, scale: torch.Tensor, last: bool) -> torch.Tensor:
        loss = self.summed_loss(batch)
        # the loop's scale is all the scaling: DeepSpeed's own division by the accumulation steps is off
        self._engine.backward(loss * scale, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # counts the micro-batch; updates nothing yet
        return loss.detach()

    def step(self, learning_rate: float) -> torch.Tensor | float:
        self.set_learning_rate(learning_rate)
        self._engine.step()
        return self._engine.get_global_grad_norm()

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag="zero")

    def load(self, folder: Path) -> None:
        self._engine.load_checkpoint(str(folder), tag="zero")

    def checkpoint_bytes(self) -> int:
        """bf16 or fp32 parameters, their fp32 master copy and AdamW's two moments; a share of each rank,
        and on rank 0 all the parameters."""
        parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in self.model.parameters())
        return 12 * parameters // self._world_size + (4 * parameters if self._is_writer else 0)

    def save_model(self, folder: Path) -> None:
        import deepspeed

        state = {}
        for name, parameter in self.model.named_parameters():
            # one at a time: no rank's device holds the whole model
            with deepspeed.zero.GatheredParameters([parameter]):
                if self._is_writer:
                    state[name] = parameter.detach().cpu().clone()
        if self._is_writer:
            self.model.save_pretrained(folder, state_dict=state)


def _initialize(model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: dict[str, Any], device: str) -> Any:
    os.environ["DS_ACCELERATOR"] = device  # read at import, which is why the import stands here
    import deepspeed

    # an inference kernel, compiled for a minute at the first start on a CPU and never called in training
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logging.logger.setLevel("WARNING")
    # it calls by names that this torch is about to rename
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
