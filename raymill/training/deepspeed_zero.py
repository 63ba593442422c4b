"""DeepSpeed's ZeRO as a `Strategy`."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import PreTrainedModel

from raymill.errors import UserError
from raymill.training.collectives import any_rank, total
from raymill.training.dataset import Batch
from raymill.training.options import DeepSpeedOptions
from raymill.training.parameters import numel
from raymill.training.runtimes.runtime import Runtime, WriteCheckpoint
from raymill.training.schedule import BatchPlan
from raymill.training.strategy import StateCopier, Strategy, ranks_per_machine
from raymill.training.weight_files import Weight

CONFIG_FILE = Path(__file__).with_name("deepspeed.json")
TAG = "zero"
"""DeepSpeed's tag for its checkpoints, and so the name of their subfolder in the trainer's checkpoints."""


def config(options: DeepSpeedOptions, runtime: Runtime, plan: BatchPlan) -> dict[str, Any]:
    """Return DeepSpeed's configuration: deepspeed.json plus the values that depend on the arguments.

    No value is "auto", because only the Hugging Face Trainer replaces such values.
    """
    base = json.loads(CONFIG_FILE.read_text())
    on_gpu = options.device == "cuda"
    zero = base["zero_optimization"] | {"stage": options.zero_stage, "overlap_comm": on_gpu}
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    if options.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
    if options.hpz and (ranks := ranks_per_machine(runtime)) < runtime.world_size:
        zero["zero_hpz_partition_size"] = ranks
    # In bf16, sums over micro-batches and averages over ranks lose small gradients. Stage 1 uses bf16 nevertheless:
    # with fp32 gradients, 8 billion parameters on 8 ranks would need 75 GiB per rank instead of 46 GiB.
    adding = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    return (
        base
        | (adding if options.zero_stage > 1 else {})
        | {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": options.micro_batch_rows,
            "gradient_accumulation_steps": plan.accumulation,
            "gradient_clipping": options.max_grad_norm,
            "bf16": {"enabled": options.precision == "bf16"},
        }
    )


class ZeRO(Strategy):
    """Shards optimizer states over the ranks, in stages 2 and 3 also gradients, and in stage 3 also parameters.

    Rajbhandari et al. 2019, arXiv:1910.02054.
    """

    @classmethod
    @contextmanager
    def loading(cls, options: DeepSpeedOptions, runtime: Runtime, plan: BatchPlan) -> Iterator[None]:
        """In stage 3, partition each parameter when it is created. Only rank 0 reads the weights, module by module."""
        if options.zero_stage < 3:
            yield
            return
        import_deepspeed()
        from transformers.integrations import HfDeepSpeedConfig

        alive = HfDeepSpeedConfig(config(options, runtime, plan))  # transformers holds only a weak reference to it
        yield
        del alive

    def __init__(self, model: PreTrainedModel, options: DeepSpeedOptions, runtime: Runtime, plan: BatchPlan) -> None:
        self.model = model
        self.copies_state = not options.offload_optimizer  # main memory may have no room for a copy of offloaded states
        self._use_optimizer(model, options)
        self.module = self._engine = _initialize(model, self.optimizer, config(options, runtime, plan))
        self._world_size = runtime.world_size
        self._is_writer = runtime.rank == 0
        self._copier = StateCopier()

    def accumulate(self, batch: Batch, scale: torch.Tensor, last: bool) -> torch.Tensor:
        loss = self.summed_loss(batch)
        # `scale` already divides by the tokens of the step, so DeepSpeed must not divide by the accumulation steps
        self._engine.backward(self._scaled(loss, scale), scale_wrt_gas=False)
        if not last:
            self._engine.step()  # counts the micro-batch, but updates nothing yet
        return loss.detach()

    def step(self, learning_rate: float) -> torch.Tensor | float:
        self.set_learning_rate(learning_rate)
        self._engine.step()
        return self._engine.get_global_grad_norm()

    def capture(self) -> WriteCheckpoint:
        engine = self._engine.checkpoint_engine
        self._engine.checkpoint_engine = files = _RecordingEngine(engine)
        with tempfile.TemporaryDirectory() as folder:  # for DeepSpeed's small extra files, which are not needed
            self._engine.save_checkpoint(folder, tag=TAG, exclude_frozen_parameters=True)
            states = {str(Path(path).relative_to(folder)): state for path, state in files.states.items()}
        self._engine.checkpoint_engine = engine
        if self.copies_state:
            states = self._copier.copy(states)

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
            reason = problem or "the conversion failed on another node"
            raise UserError(
                f"DeepSpeed could not convert the checkpoint in {folder} ({reason}). "
                f"Resume with the same number of workers: --num-workers {world_size}."
            )
        self._load_universal(converted)
        total(torch.zeros(1, device=self._engine.device))  # wait until all ranks have read the folder
        shutil.rmtree(converted, ignore_errors=True)

    def _load_universal(self, folder: Path) -> None:
        """Load a checkpoint that `_convert` wrote, and repair what DeepSpeed 0.19 damages in the optimizer."""
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        self._engine._config.load_universal_checkpoint = True
        self._engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=False)
        self._engine._config.load_universal_checkpoint = False
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay  # DeepSpeed gives all groups the values of the first group
        for state in self.optimizer.state.values():
            # DeepSpeed shares one counter between all parameters, so one step would advance it once per parameter
            state["step"] = state["step"].clone()

    def checkpoint_bytes(self) -> int:
        """Return an upper bound on the bytes that this rank saves: its share of the fp32 master copy and of the
        optimizer's states, and on rank 0 also all trained parameters."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        parameters = sum(map(numel, trained))
        return self.state_bytes() * parameters // self._world_size + (4 * parameters if self._is_writer else 0)

    def gather(self) -> Iterator[Weight]:
        import deepspeed

        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                with deepspeed.zero.GatheredParameters([parameter]):
                    whole = parameter.detach().cpu().clone() if self._is_writer else None
                if whole is not None:
                    yield name, whole


class _RecordingEngine:
    """Wraps DeepSpeed's checkpoint engine, and keeps the states in memory instead of writing them to files."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.states: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def save(self, state_dict: Any, path: str) -> None:
        self.states[path] = state_dict

    def preserves_storage_sharing(self) -> bool:
        return False  # otherwise DeepSpeed clones tensors that share a storage, but nothing here needs clones


def _convert(folder: Path) -> tuple[Path, str]:
    """Convert a checkpoint to DeepSpeed's universal format, which any number of ranks can load.

    Return the folder of the converted checkpoint, and the error or an empty string. The first process of each node
    converts while the others wait.
    """
    identity = f"{folder} {(folder / TAG).stat().st_mtime_ns}"  # a run that starts over reuses the name of the folder
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
    deepspeed = import_deepspeed()
    if config["bf16"]["enabled"]:
        for parameter in model.parameters():  # DeepSpeed does not cast adapters that were added to partitioned weights
            parameter.data = parameter.data.bfloat16()
    # DeepSpeed uses names that torch has deprecated
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def import_deepspeed() -> Any:
    """Import DeepSpeed, without its kernel for inference and its messages."""
    import deepspeed  # imported late, because it reads DS_ACCELERATOR, which the trainer sets

    # disable an inference kernel: training never calls it, and on a CPU its first compilation takes a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logging.logger.setLevel("WARNING")
    return deepspeed
