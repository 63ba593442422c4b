"""Trains composite models, such as Gemma 3 from 4B and Qwen 3.5, on text: a text model with a vision tower.

The whole model is loaded and exported. Only what text reaches is trained.
"""

import re
from itertools import chain
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from raymill.model_config import other_parts, text_config
from raymill.training.parameters import numel


def from_pretrained(location: str, **options: Any) -> PreTrainedModel:
    """Return a causal language model with all its parts. The arguments are those of transformers' `from_pretrained`."""
    return auto_class(AutoConfig.from_pretrained(location)).from_pretrained(location, **options)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that loads a causal language model with all its parts.

    `AutoModelForCausalLM` leaves out the vision tower of Qwen 3.5 and Llama 4, and does not know Mistral 3.
    """
    text = text_config(config)
    is_composite = text is not config and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_composite and not text.is_encoder_decoder else AutoModelForCausalLM


def text_model(model: PreTrainedModel) -> nn.Module:
    """Return the part of the model that processes text, without the output layer of most models."""
    return model.get_decoder()


def without_text(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that text does not reach, such as those of a vision tower."""
    if text_config(model.config) is model.config:
        return set()
    parts = (text_model(model), model.get_input_embeddings(), model.get_output_embeddings())
    reached = {id(parameter) for parameter in chain.from_iterable(part.parameters() for part in parts)}
    return {name for name, parameter in model.named_parameters() if id(parameter) not in reached}


def freeze(model: PreTrainedModel) -> None:
    """Exclude what text does not reach from training. Otherwise DDP would wait for its gradients."""
    for name in without_text(model):
        model.get_parameter(name).requires_grad_(False)


def outside(model: PreTrainedModel) -> str | None:
    """Return a regular expression that matches the names of the modules outside the text model, for peft.

    None: there are no others.
    """
    if text_config(model.config) is model.config:
        return None
    name = next(name for name, module in model.named_modules() if module is text_model(model))
    return rf"(?!{re.escape(name)}\.).*"


def note(model: PreTrainedModel) -> str:
    """Return a note about the parts of the model that are not trained, or "" if there are none."""
    count = sum(numel(model.get_parameter(name)) for name in without_text(model))
    if not count:
        return ""
    parts = " and ".join(other_parts(model.config))
    return f"note: only text is trained. The {count:,} parameters for {parts} stay as they are, and are exported too."
