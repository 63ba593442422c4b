"""Count the parameters of a model from its configuration, without its weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

import torch
from torch import nn
from transformers import PreTrainedConfig

from raymill import settings
from raymill.errors import UserError
from raymill.model_config import layer_configs, text_config
from raymill.training import composite
from raymill.training.chunked_loss import has_chunks
from raymill.training.flops import EXPERT, Compute, chosen_experts, compute_of, head_size
from raymill.training.packed_attention import has_varlen

LORA_RANK = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. Tensor sizes are in elements."""

    parameters: int
    """All parameters that text reaches. Tied parameters count once."""
    untrained: int
    """All other parameters, such as those of a vision tower. Training only loads and exports them."""
    multiplied: int
    """Parameters in matrix products: all but those of an untied input embedding, which is only looked up."""
    largest: int
    """Parameters of the largest tensor."""
    adapters: int
    """Parameters of LoRA adapters with rank LORA_RANK on every linear layer of the blocks, and on every expert."""
    layers: int
    heads: int
    hidden: int
    query: int
    """Elements of one token's queries in one block. Keys and values may have fewer. If blocks differ, the mean."""
    key: int
    """Elements of one token's keys in one block. The token's values have the same size. If blocks differ, the mean."""
    normed_heads: int
    """`query` + `key` if the block normalizes queries and keys, as in Qwen3. Otherwise 0."""
    intermediate: int
    """Width of the feed-forward layer, or of all experts that process a token together."""
    experts: int
    """Parameters of all experts. 0 if the model has none."""
    chosen_experts: int
    """Number of experts that process a token."""
    vocabulary: int
    has_varlen: bool
    """Whether attention on a GPU needs no masks and no keys and values that are repeated for each head."""
    has_chunks: bool
    """Whether the loss can be computed in chunks of tokens."""
    compute: Compute
    """Sizes that determine the number of operations per token."""

    @property
    def is_tied(self) -> bool:
        """Whether the input embedding and the output layer share weights."""
        return self.multiplied == self.parameters

    @property
    def embeddings(self) -> int:
        """Parameters of the input embedding, and of the output layer unless they share weights."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2)


def shape_of(config: PreTrainedConfig) -> Shape:
    """Return the sizes of a model. It is built on torch's meta device, without memory for its weights.

    Raises:
        UserError: the configuration is not that of a causal language model.
    """
    try:
        with torch.device("meta"):
            model = composite.auto_class(config).from_config(config)
    except ValueError:
        raise UserError(
            f"{config.model_type} is not a causal language model in transformers. Choose another model: "
            f"{settings.inv('plan MODEL')}"
        ) from None
    text = text_config(config)
    layers = layer_configs(config)
    heads = max(layer.num_attention_heads for layer in layers)
    query = _mean(layer.num_attention_heads * head_size(layer) for layer in layers)
    key = _mean(_key_heads(layer) * head_size(layer) for layer in layers)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    blocks = composite.text_model(model)
    linears = [module for module in blocks.modules() if isinstance(module, nn.Linear) and module is not output]
    others = composite.without_text(model)
    sizes = {name: value.numel() for name, value in model.named_parameters() if name not in others}
    experts = [value.shape for name, value in model.named_parameters() if EXPERT.search(name) and value.dim() == 3]
    chosen = chosen_experts(text)
    expert_width = getattr(text, "moe_intermediate_size", None)
    width = max(getattr(layer, "intermediate_size", None) or 4 * text.hidden_size for layer in layers)
    return Shape(
        parameters=sum(sizes.values()),
        untrained=sum(model.get_parameter(name).numel() for name in others),
        multiplied=sum(sizes.values()) - (0 if output.weight is embedding.weight else embedding.weight.numel()),
        largest=max(sizes.values()),
        adapters=LORA_RANK * sum(linear.in_features + linear.out_features for linear in linears)
        + LORA_RANK * sum(count * (rows + columns) for count, rows, columns in experts),
        layers=text.num_hidden_layers,
        heads=heads,
        hidden=text.hidden_size,
        query=query,
        key=key,
        normed_heads=query + key if any(name.endswith("q_norm.weight") for name in sizes) else 0,
        intermediate=chosen * (expert_width or width) if chosen else width,
        experts=sum(count for name, count in sizes.items() if EXPERT.search(name)),
        chosen_experts=chosen,
        vocabulary=text.vocab_size,
        has_varlen=has_varlen(model),
        has_chunks=has_chunks(model),
        compute=compute_of(model),
    )


def _key_heads(layer: PreTrainedConfig) -> int:
    return getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads


def _mean(sizes: Iterable[int]) -> int:
    return math.ceil(mean(sizes))
