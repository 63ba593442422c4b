"""vLLM's Mistral 3, with the names that vLLM 0.29 imports from transformers and that transformers has renamed."""

import torch
from transformers import PixtralVisionConfig
from transformers.models.pixtral import modeling_pixtral


def _rotary_embedding(config: PixtralVisionConfig, device: torch.device) -> torch.nn.Module:
    return modeling_pixtral.PixtralVisionRotaryEmbedding(config).to(device)


def _position_ids(patch_embeds: list[torch.Tensor], max_width: int) -> torch.Tensor:
    """Return the row and the column of each patch of all images: shape (patches, 2). The wider images do not matter."""
    grids = [torch.cartesian_prod(*map(torch.arange, image.shape[-2:])) for image in patch_embeds]
    return torch.cat(grids)


modeling_pixtral.PixtralRotaryEmbedding = _rotary_embedding
modeling_pixtral.position_ids_in_meshgrid = _position_ids

from vllm.model_executor.models.mistral3 import Mistral3ForConditionalGeneration  # noqa: E402, F401 -- needs the names
