"""Runs steps of a fine-tuning job on a fake GPU for `inv fit`, and reports how much memory they need.

Its kernels compute nothing, but torch allocates memory as on a real GPU. Weights are not read, rows are made up, and
collectives return at once, because there are no other ranks.
"""

import ctypes
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, PreTrainedModel

from raymill import settings
from raymill.data.options import PreprocessOptions
from raymill.errors import UserError
from raymill.job_context import JobContext
from raymill.training import composite, reward_config
from raymill.training.dataset import Batch, as_batch
from raymill.training.options import TrainOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.schedule import check_batches, spread
from raymill.training.strategy import MakeStrategy
from raymill.training.trainer import Trainer

STEPS = 2  # only the second step starts with optimizer states in memory
DOCUMENTS = 2  # per row


class FakeRuntime(SingleProcess):
    """The `Runtime` of rank 0, without the other ranks."""

    def __init__(self, folder: Path, device: torch.device, world_size: int, local_world_size: int) -> None:
        super().__init__(folder, device, keep_checkpoints=1)
        self.world_size = world_size
        self.local_world_size = local_world_size

    def wrap(self, model: nn.Module) -> nn.Module:
        module = DistributedDataParallel(model.to(self.device), gradient_as_bucket_view=True)
        module.register_comm_hook(None, _keep_bucket)
        return module


class FakeRows:
    """Rows of zeros for one rank."""

    chat_template = None
    rows_per_epoch = None

    def __init__(self, sequence_length: int, rows: int) -> None:
        self.sequence_length = sequence_length
        self.eos_ids: list[int] = []
        zeros = np.zeros((rows, sequence_length), dtype=np.int32)
        positions = zeros + np.arange(sequence_length, dtype=np.int32) % max(1, sequence_length // DOCUMENTS)
        self._batch = as_batch({"input_ids": zeros, "labels": zeros, "position_ids": positions})
        starts = self._batch["document_starts"]
        self._batch |= {
            "is_good": torch.ones_like(self._batch["labels"]),
            "reference": torch.zeros(rows, 2, starts.shape[1]),
        }

    def rows(self, step: int) -> Batch:
        return {name: column.clone() for name, column in self._batch.items()}

    def names(self, step: int, first: int, count: int) -> list[str]:
        return []


def fit(options: TrainOptions, make_strategy: MakeStrategy) -> None:
    """Run STEPS optimizer steps, and write a report as JSON to the file that the job's context names.

    All sizes are those of rank 0, in bytes. `allocated` and `reserved` are the peaks of torch's allocator on the GPU.
    `main_memory` is the peak size of large blocks in main memory after the weights were loaded. If the GPU had too
    little memory, `failed` says when: while loading the model, or in a step.

    Raises:
        UserError: the options do not fit together, or cannot be measured on a fake GPU.
    """
    check_batches(options.global_batch_rows, options.micro_batch_rows, options.max_workers, options.max_workers)
    if options.quantize_base:
        raise UserError("fit cannot measure --quantize-base, because quantization needs the real weights")
    folder = settings.PROJECT / options.model  # not settings.resolve, which may return a URI in the bucket
    model = str(folder) if folder.is_dir() else options.model
    with tempfile.TemporaryDirectory() as output:
        # a URI, because for a path, the trainer would check the free space on this machine's disk instead of a node's
        changes = {"model": model, "output": f"file://{output}", "steps": options.steps or STEPS}
        options = options.model_copy(update=changes)
        _measure(options, make_strategy, Path(output))


def _measure(options: TrainOptions, make_strategy: MakeStrategy, folder: Path) -> None:
    world_size = options.max_workers
    local_world_size = min(world_size, int(os.environ["LOCAL_WORLD_SIZE"]))  # `inv fit` sets the GPUs of an instance
    # for DeepSpeed, which transformers imports and which reads these variables
    os.environ |= {"DS_ACCELERATOR": "cuda", "WORLD_SIZE": str(world_size)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    _replace_new_groups()
    _hide_numbers()
    _replace_weights(options.model, make_strategy.make_objective(options).output == "scores")
    plan = spread(options.global_batch_rows, options.micro_batch_rows, world_size)
    rows = FakeRows(settings.load(PreprocessOptions, "preprocess").sequence_length, plan.rows_per_rank)
    runtime = FakeRuntime(folder, torch.device("cuda", 0), world_size, local_world_size)
    report: dict[str, Any] = {"world_size": world_size, "micro_batch_rows": options.micro_batch_rows}
    part = "loading the model"
    try:
        trainer = Trainer(options, runtime, make_strategy, rows)
        for step in range(1, STEPS + 1):
            part = f"step {step}"
            trainer.step(step)
    except torch.OutOfMemoryError:
        report["failed"] = part
    report |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    report["main_memory"] = _library().fake_gpu_main_memory_peak()
    Path(str(JobContext.current().fit_report)).write_text(json.dumps(report))


def _hide_numbers() -> None:
    """Print tensors without their numbers, which no kernel computed.

    DeepSpeed prints its arguments, and torch would read even the count of numbers to print from the fake GPU.
    """
    tensor: Any = torch.Tensor
    parameter: Any = nn.Parameter
    tensor.__repr__ = parameter.__repr__ = lambda self: f"tensor of shape {tuple(self.shape)}"


def _replace_weights(folder: str, as_reward_model: bool) -> None:
    """Make `from_pretrained` use empty tensors in main memory instead of weight files.

    These tensors do not count as main memory, because on a node the weights stay in memory-mapped files.
    """
    config = AutoConfig.from_pretrained(folder)
    if as_reward_model:
        config = reward_config.from_config(folder, config)
    kind = composite.auto_class(config)
    with torch.device("meta"):
        shapes = kind.from_config(config)

    def load(_: str, **options: Any) -> PreTrainedModel:
        weights = {name: torch.empty(shape.shape, dtype=options["dtype"]) for name, shape in shapes.named_parameters()}
        model = type(shapes).from_pretrained(None, **options | {"config": shapes.config, "state_dict": weights})
        weights.clear()
        _library().fake_gpu_reset_main_memory_peak()
        return model

    kind.from_pretrained = staticmethod(load)


def _library() -> ctypes.CDLL:
    """Return the fake GPU's library, which counts the bytes of large blocks in main memory."""
    library = ctypes.CDLL(None)
    library.fake_gpu_main_memory_peak.restype = ctypes.c_size_t
    return library


def _replace_new_groups() -> None:
    """Make every new process group a fake one, because gloo would wait for the other ranks."""
    new_group = dist.new_group

    def fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **options | {"backend": "fake"})

    dist.new_group = fake_group


def _keep_bucket(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the rank's own gradients instead of an average, which the fake process group does not compute."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[bucket.buffer().device])
    future.set_result(bucket.buffer())
    return future
