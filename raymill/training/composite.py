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
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from raymill.model_config import is_classifier, other_parts, text_config
from raymill.training import reward_config
from raymill.training.parameters import numel


def from_pretrained(location: str, *, as_reward_model: bool = False, **options: Any) -> PreTrainedModel:
    """Return a language model with all its parts. The other arguments are those of transformers' `from_pretrained`.

    Args:
        as_reward_model: whether to replace the output layer by a head for scores, if it is not a reward model yet.
    """
    config = AutoConfig.from_pretrained(location)
    if not as_reward_model:
        return auto_class(config).from_pretrained(location, **options)
    config, verbosity = reward_config.from_config(location, config), logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # transformers would advise to train the new head
    try:
        return auto_class(config).from_pretrained(location, config=config, **options)
    finally:
        logging.set_verbosity(verbosity)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that loads a language model with all its parts, or a reward model.

    `AutoModelForCausalLM` leaves out the vision tower of Qwen 3.5 and Llama 4, and does not know Mistral 3.
    """
    if is_classifier(config):
        return AutoModelForSequenceClassification
    text = text_config(config)
    is_composite = text is not config and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_composite and not text.is_encoder_decoder else AutoModelForCausalLM


def output_layer(model: PreTrainedModel) -> Any:
    """Return the layer that computes the logits or, in a reward model, the scores."""
    return model.get_output_embeddings() or getattr(model, "score", None)


def text_model(model: PreTrainedModel) -> nn.Module:
    """Return the part of the model that processes text, without the output layer of most models."""
    return model.get_decoder()


def without_text(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that text does not reach, such as those of a vision tower."""
    if text_config(model.config) is model.config:
        return set()
    parts = (text_model(model), model.get_input_embeddings(), output_layer(model))
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
