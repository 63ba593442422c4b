"""Keeps the documents of a packed row apart: no document attends to another.

On a GPU, models of TESTED_FAMILIES use torch's FlashAttention for sequences of different lengths. Other models get
dense masks, which take more memory, and for which torch has no equally fast kernel.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from raymill.model_config import text_config
from raymill.training.composite import text_model
from raymill.training.dataset import COLUMNS, Batch

VARLEN = "packed_documents"
"""Name under which transformers knows `attend`."""

TESTED_FAMILIES = (
    "gemma3_text",
    "glm4",
    "granite",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Model types for which tests compare `attend` and the chunked loss with what the model computes itself. Families whose
attention has soft capping, sinks, or values of another size than the queries cannot use `attend`."""

LARGEST_HEAD = 256  # elements of one head's query; FlashAttention has no kernels for more


def use_varlen(model: PreTrainedModel) -> None:
    """Make a model compute its attention with `attend`. `has_varlen` must be true for the model."""
    AttentionInterface.register(VARLEN, attend)
    model.set_attn_implementation(VARLEN)


def has_varlen(model: PreTrainedModel) -> bool:
    """Return whether a model can compute its attention with `attend` in bf16 on a GPU."""
    config = text_config(model.config)
    sizes = (getattr(module, "head_dim", None) for module in text_model(model).modules())
    heads = [size for size in sizes if isinstance(size, int)]
    dropout = getattr(config, "attention_dropout", 0.0)
    return config.model_type in TESTED_FAMILIES and bool(heads) and max(heads) <= LARGEST_HEAD and not dropout


def model_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """Return the arguments with which to call the model on packed rows."""
    return {name: batch[name] for name in COLUMNS} | {"attention_mask": attention_mask(model, batch)}


def attention_mask(model: PreTrainedModel, batch: Batch) -> Any:
    """Return the argument that keeps the documents of packed rows apart. `batch` needs no labels."""
    is_varlen = text_config(model.config)._attn_implementation == VARLEN
    return _boundaries_by_type(model, batch) if is_varlen else _masks(model, batch["position_ids"])


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention within each document, as one of the functions in transformers' `AttentionInterface`.

    Args:
        module: the attention layer.
        query: shape (rows, heads, sequence_length, head size).
        key: as `query`, possibly with fewer heads.
        value: as `key`, and in the data type of the computation. With autocast, queries and keys may be in fp32.
        attention_mask: what `_boundaries` returns.
        scaling: factor for the products of queries and keys. None: 1 / sqrt(head size).
        sliding_window: number of tokens that a token attends to, including itself. None: all before it.

    Returns:
        The output, of shape (rows, sequence_length, heads, head size), and None instead of attention weights.
    """
    rows, _heads, length, _size = query.shape
    boundaries = attention_mask.flatten()
    output = varlen_attn(
        *(states.transpose(1, 2).flatten(0, 1).to(value.dtype) for states in (query, key, value)),
        cu_seq_q=boundaries,
        cu_seq_k=boundaries,
        max_q=length,
        max_k=length,
        scale=scaling,
        window_size=(sliding_window - 1 if sliding_window else -1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor)  # a tuple only if asked for more
    return output.unflatten(0, (rows, length)), None


def _boundaries(batch: Batch) -> torch.Tensor:
    """Return where documents begin in the concatenated rows, and the number of all tokens, in ascending order.

    Documents of length 0 fill up the starts of rows that have fewer documents than others. The shape is (1, 1, 1,
    number of starts + 1), because models pass four-dimensional masks on to their attention unchanged.
    """
    starts = batch["document_starts"]
    rows, length = batch["input_ids"].shape
    first = torch.arange(rows, dtype=starts.dtype, device=starts.device) * length
    return nn.functional.pad((starts + first[:, None]).flatten(), (0, 1), value=rows * length)[None, None, None]


def _boundaries_by_type(model: PreTrainedModel, batch: Batch) -> Any:
    """Return the boundaries in the form of `_masks`: Gemma 3 with a vision tower would replace any other form."""
    boundaries = _boundaries(batch)
    types = getattr(text_config(model.config), "layer_types", None)
    return dict.fromkeys(types, boundaries) if types else boundaries


def _masks(model: PreTrainedModel, position_ids: torch.Tensor) -> Any:
    """Return the masks of a model's attention layers. `position_ids` restart at each document.

    Some models, such as gpt-oss and Granite 4, would not derive the masks from position_ids themselves.
    """
    config = text_config(model.config)
    embeddings = torch.empty((), dtype=model.dtype, device=position_ids.device)  # only shape and dtype matter
    embeddings = embeddings.expand(*position_ids.shape, config.hidden_size)
    return create_masks_for_generate(config, embeddings, None, None, position_ids=position_ids)
