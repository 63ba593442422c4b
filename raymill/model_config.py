"""Reads facts about text from a model's configuration.

The configurations of composite models, such as Gemma 3 from 4B, contain one configuration for the text model and others
for the vision tower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raymill.errors import UserError

if TYPE_CHECKING:  # importing it takes seconds
    from transformers import PreTrainedConfig


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the text model. Unless the model is composite, this is `config`."""
    return config.get_text_config()


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return whether the model gives scores to texts, such as a reward model, instead of writing them."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def refuse_classifier(model: str, config: PreTrainedConfig) -> None:
    """Raise UserError if the model does not write text."""
    if is_classifier(config):
        raise UserError(
            f"{model} is a classifier such as a reward model, which gives scores to texts and does not write any. Pass "
            "a language model."
        )


def layer_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the configuration of each layer of the text model. In Gemma 4, for example, the size of a head varies."""
    text = text_config(config)
    return [text.per_layer_config[number] for number in range(text.num_hidden_layers)]


def context_length(config: PreTrainedConfig) -> int | None:
    """Return how many tokens the model supports, or None if its configuration does not say."""
    return getattr(text_config(config), "max_position_embeddings", None)


def other_parts(config: PreTrainedConfig) -> list[str]:
    """Return the kinds of input besides text for which the model has parts, such as `vision` and `audio`."""
    text = text_config(config)
    parts = {name: getattr(config, name, None) for name in config.sub_configs} if text is not config else {}
    return sorted(name.removesuffix("_config") for name, part in parts.items() if part not in (None, text))
