"""DeepSpeed's ZeRO over the same loop."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import PreTrainedModel

from pipeline.training.collectives import any_rank, total
from pipeline.training.dataset import Batch
from pipeline.training.options import DeepSpeedOptions
from pipeline.training.runtimes.runtime import Runtime, Write
from pipeline.training.schedule import BatchPlan
from pipeline.training.strategies import Strategy, adamw, copied
from settings import UserError

TAG = "zero"
"""DeepSpeed's name for a checkpoint: a folder in that of the loop."""


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

    def __init__(
        self,
        config: dict[str, Any],
        model: PreTrainedModel,
        options: DeepSpeedOptions,
        run: Runtime,
        plan: BatchPlan,
    ) -> None:
        self.model = model
        self.optimizer = adamw(model, options.weight_decay)
        self.module = self._engine = _initialize(model, self.optimizer, fill_config(config, options, plan))
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

    def capture(self) -> Write:
        engine = self._engine.checkpoint_engine
        self._engine.checkpoint_engine = files = _Files(engine)
        with tempfile.TemporaryDirectory() as folder:  # its small files of other kinds are of no use here
            self._engine.save_checkpoint(folder, tag=TAG, exclude_frozen_parameters=True)
            states = {Path(path).relative_to(folder): state for path, state in files.states.items()}
        self._engine.checkpoint_engine = engine

        def write(folder: Path) -> None:
            (folder / TAG).mkdir()
            for path, state in states.items():
                torch.save(state, folder / path)

        return write

    def load(self, folder: Path, world_size: int) -> None:
        if world_size == self._world_size:
            self._engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=False)
            return
        if self._is_writer:
            print(f"converting the checkpoint of {world_size} workers for {self._world_size}", flush=True)
        converted, problem = _convert(folder)
        if any_rank(bool(problem), self._engine.device):
            reason = problem or "another rank has the reason"
            raise UserError(f"DeepSpeed could not convert the checkpoint in {folder} ({reason}); use as many workers.")
        self._load_universal(converted)
        total(torch.zeros(1, device=self._engine.device))  # no rank of this node reads it any more
        shutil.rmtree(converted, ignore_errors=True)

    def _load_universal(self, folder: Path) -> None:
        """Load what `_convert` wrote, and mend what DeepSpeed 0.19 does to the optimizer on its way."""
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        self._engine._config.load_universal_checkpoint = True
        self._engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=False)
        self._engine._config.load_universal_checkpoint = False
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay  # it gives every group the values of the first
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()  # and all parameters one counter, which each of them would advance

    def checkpoint_bytes(self) -> int:
        """bf16 or fp32 parameters, their fp32 master copy and AdamW's two moments; a share of each rank,
        and on rank 0 all the parameters."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
        return 12 * parameters // self._world_size + (4 * parameters if self._is_writer else 0)

    def gather(self) -> dict[str, torch.Tensor]:
        import deepspeed

        state = {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            # one at a time: no rank's device holds the whole model
            with deepspeed.zero.GatheredParameters([parameter]):
                if self._is_writer:
                    state[name] = parameter.detach().cpu().clone()
        return state


class _Files:
    """Stands before DeepSpeed's writer of files, and keeps a copy of what it would write."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.states: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def save(self, state_dict: Any, path: str) -> None:
        self.states[path] = copied(state_dict)

    def preserves_storage_sharing(self) -> bool:
        return False  # a copy shares nothing: DeepSpeed need not make another


def _convert(folder: Path) -> tuple[Path, str]:
    """What ranks have sharded in DeepSpeed's universal form, whole by parameter, which any number of ranks can read; or
    why it could not be made.

    Made once a node: its first process converts, the others wait.
    """
    identity = f"{folder} {(folder / TAG).stat().st_mtime_ns}"  # a run that began anew has other files of this name
    converted = Path(tempfile.gettempdir(), f"universal-{hashlib.sha256(identity.encode()).hexdigest()[:12]}")
    with FileLock(f"{converted}.lock"):
        if not (converted / "latest_universal").exists():
            command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
            command += ["--input_folder", str(folder / TAG), "--output_folder", str(converted / TAG)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return converted, (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return converted, ""


def _initialize(model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    import deepspeed  # here, as it reads DS_ACCELERATOR, which the loop has set

    # an inference kernel, compiled for a minute at the first start on a CPU and never called in training
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logging.logger.setLevel("WARNING")
    # it calls by names that this torch is about to rename
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
