"""vLLM's Mistral 3, with the names that vLLM 0.29 imports from transformers and that transformers has renamed."""

import torch
from transformers import PixtralVisionConfig
from transformers.models.pixtral import modeling_pixtral


def _rotary_embedding(config: PixtralVisionConfig, device: torch.device) -> torch.nn.Module:
    return modeling_pixtral.PixtralVisionRotaryEmbedding(config).to(device)


modeling_pixtral.PixtralRotaryEmbedding = _rotary_embedding
modeling_pixtral.position_ids_in_meshgrid = None  # vLLM calls it for images only, which the server refuses

from vllm.model_executor.models.mistral3 import Mistral3ForConditionalGeneration  # noqa: E402, F401 -- needs the names
