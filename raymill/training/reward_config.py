"""The configuration of a reward model: of a sequence classifier with a single score, made from a language model's."""

import copy
import json

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


def set_padding(tokenizer: PreTrainedTokenizerFast, eos_ids: list[int], embeddings: int) -> int | None:
    """Make a tokenizer pad with a token with which no document ends, and return its id.

    transformers reads the score at the last token that is no padding. The token is the tokenizer's own, or another
    special one with an embedding that neither the chat template nor the model writes. None: there is no such token, so
    transformers refuses to score several texts at once.
    """
    definition = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    unknown = None if definition.get("byte_fallback") else definition.get("unk_token")  # stands for any text
    written = {*eos_ids, tokenizer.eos_token_id, tokenizer.bos_token_id}
    added = sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder().items())
    free = [
        token.content
        for number, token in added
        if token.special
        and number < embeddings
        and number not in written
        and token.content != unknown
        and token.content not in (tokenizer.chat_template or "")
    ]
    own = tokenizer.pad_token
    tokenizer.pad_token = own if own in free else min(free, key=lambda token: "pad" not in token, default=None)
    return tokenizer.pad_token_id
