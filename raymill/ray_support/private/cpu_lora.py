"""vLLM's LoRA operations for CPUs: keeps adapters away from the tokens of requests that use none.

`worker_extension_cls` of vLLM's arguments names `SkipTokensWithoutAdapter`. Each process of the engine that computes
imports this module before it builds the model, also if vLLM starts the process itself.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

OPERATIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


class SkipTokensWithoutAdapter:
    """An empty extension of vLLM's worker. vLLM imports this module to find it."""


def skipping(operation: Callable[..., None]) -> Callable[..., None]:
    """Return `operation`, but without an effect on the tokens whose index is -1.

    The index of a token says which of the stacked adapters applies to it, and -1 means none. PyTorch reads -1 as the
    last one. Its result is discarded rather than multiplied by 0, because an adapter may hold NaN.
    """

    @functools.wraps(operation)
    def skip(
        inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, *args: Any, **kw: Any
    ) -> None:
        before = output.clone()
        operation(inputs, weights, output, indices, *args, **kw)
        output.copy_(torch.where((indices >= 0).unsqueeze(1), output, before))

    return skip


def install() -> None:
    """Replace the operations in this process. The operations for several tokens of a sequence call these three.

    Relies on `bgmv_shrink`, `bgmv_expand` and `bgmv_expand_slice` of vllm.lora.ops.torch_ops.lora_ops, which
    vllm.lora.punica_wrapper.punica_cpu imports by name (vLLM 0.29). The GPU's kernels skip such tokens.
    """
    for name in OPERATIONS:
        operation = getattr(lora_ops, name)
        if not hasattr(operation, "__wrapped__"):  # a process may load this module twice, under two names
            for module in (lora_ops, punica_cpu):
                setattr(module, name, skipping(operation))


install()
