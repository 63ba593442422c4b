"""Test what the code assumes about torch and DeepSpeed, but what their documentation does not promise.

Each docstring names the code that relies on it. `test_finetune.py` tests that Ray Train retries no final failure.
"""

from typing import Any

import architectures
import pytest
import ranks
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from raymill import settings
from raymill.planner.shape import shape_of
from raymill.training import deepspeed_zero
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions, DeepSpeedOptions
from raymill.training.schedule import check_batches, spread

# ------------------------------------------------------------------------------------------ autocast


class _Copies(TorchDispatchMode):
    """Measures the copies of a model's weights in bf16, in bytes."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._weights = {weight.data_ptr() for weight in model.parameters()}
        self._copies: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._weights:
            storage = result.untyped_storage()
            self._copies.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    @property
    def bytes(self) -> int:
        return sum(size for reference, size in self._copies if not reference.expired())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast_keeps_copies_of_all_weights_until_the_end_of_a_pass(checkpointing: bool) -> None:
    """`memory.peak` counts these copies for DDP as `buffers`, with and without checkpointing.

    When the logits are computed, a copy of every multiplied weight exists. The backward pass frees the copies. With
    checkpointing, it makes a block's copies again, so there is only one block's share at a time.
    """
    model = architectures.build("Llama").train()
    shape = shape_of(model.config)
    if checkpointing:
        model.activation_checkpointing_enable()
    options = settings.load(DDPOptions, "train", profile="local").model_copy(update={"precision": "bf16"})
    ddp = DDP(model, options, ranks.Alone(), spread(1, 1, 1))  # type: ignore[arg-type]
    copies, at_logits, in_backward = _Copies(model), [], []
    model.lm_head.register_forward_hook(lambda *_: at_logits.append(copies.bytes))
    for block in model.model.layers:
        block.self_attn.register_full_backward_hook(lambda *_: in_backward.append(copies.bytes))
    row = torch.arange(64)[None]
    with copies:
        ddp.accumulate({"input_ids": row, "labels": row, "position_ids": row}, torch.tensor(1.0), last=True)
    of_block = 2 * (shape.parameters - shape.embeddings) / shape.layers
    assert at_logits == [pytest.approx(2 * shape.multiplied, rel=0.01)]
    assert max(in_backward) <= (of_block if checkpointing else 2 * shape.multiplied)
    assert copies.bytes == 0


# ------------------------------------------------------------------------------------------ DeepSpeed


@pytest.mark.parametrize("workers", [8, 16])
@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3},
        {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ],
    ids=str,
)
def test_deepspeed_accepts_the_configuration(
    workers: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`deepspeed_zero.config` leaves out the size of the global batch, which DeepSpeed computes from its ranks.

    On AWS, DeepSpeed checks the configuration only when the workers start.
    """
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed runs on Linux only")
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda: workers)
    options = settings.load(DeepSpeedOptions, "train", "deepspeed", profile="cluster").model_copy(update=changes)
    check_batches(options.global_batch_rows, options.micro_batch_rows, workers, workers)
    plan = spread(options.global_batch_rows, options.micro_batch_rows, workers)
    runtime: Any = ranks.Rank(0, workers)
    parsed = deepspeed.DeepSpeedConfig(deepspeed_zero.config(options, runtime, plan))
    assert parsed.train_batch_size == options.global_batch_rows
    assert parsed.gradient_accumulation_steps == plan.accumulation
    assert (parsed.zero_optimization_stage, parsed.bfloat16_config.enabled) == (changes["zero_stage"], True)
