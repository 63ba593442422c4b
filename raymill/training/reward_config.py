"""The configuration of a reward model: of a sequence classifier with a single score, made from a language model's."""

import copy

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.modeling_layers import GenericForSequenceClassification

from raymill.errors import UserError
from raymill.model_config import is_classifier

HEAD = "score.weight"


def from_config(model: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a reward model that begins as `model`, which may be a reward model itself.

    Raises:
        UserError: transformers has no such class for the model, or it is a classifier with several labels.
    """
    if is_classifier(config) and config.num_labels != 1:
        raise UserError(
            f"{model} is a classifier with {config.num_labels} labels, not a reward model; pass another one."
        )
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    # classifiers of models with a vision tower, such as Gemma 3, have other names for weights
    is_known = kind and issubclass(kind, GenericForSequenceClassification) and config.get_text_config() is config
    if not is_known:
        raise UserError(
            f"transformers has no reward model of the type {config.model_type}; pass a --model of another family."
        )
    changed = copy.deepcopy(config)
    changed.architectures, changed.num_labels = [kind.__name__], 1
    return changed


def set_padding(tokenizer: PreTrainedTokenizerFast, eos_ids: list[int]) -> int | None:
    """Make a tokenizer pad with a token that ends no answer, and return its id.

    transformers reads the score at the last token that is no padding. None: the tokenizer has no such token, so
    transformers refuses to score several texts at once.
    """
    ends = {tokenizer.eos_token, *tokenizer.convert_ids_to_tokens(eos_ids)}
    special = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens)
    tokenizer.pad_token = next((token for token in special if token and token not in ends), None)
    return tokenizer.pad_token_id
