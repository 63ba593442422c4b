"""Load a model's tokenizer, its chat template and its stop tokens."""

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

from raymill import settings
from raymill.errors import UserError
from raymill.ray_support import hub_access, model_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


class SpecialTokens(NamedTuple):
    """The tokens that a tokenizer itself adds to a prompt that no chat template renders."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "SpecialTokens":
        made = tokenizer("a", return_special_tokens_mask=True)
        ids, mask = made["input_ids"], made["special_tokens_mask"]
        return cls(ids[: mask.index(0)], ids[len(mask) - mask[::-1].index(0) :])

    def start(self, ids: list[int]) -> list[int]:
        """Return `ids` with the tokens before them, unless the text has these tokens itself."""
        return ids if ids[: len(self.before)] == self.before else self.before + ids

    def prompt(self, ids: list[int]) -> list[int]:
        """Return `ids` as a prompt."""
        ids = self.start(ids)
        return ids if not self.after or ids[-len(self.after) :] == self.after else ids + self.after


def load_tokenizer(
    model: str, chat_template: str | None = None, *, setting: str = "model"
) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a model.

    Args:
        model: A Hugging Face folder, a URI or a hub id.
        chat_template: The text of a template that replaces the tokenizer's own.
        setting: The setting that names `model`, for error messages.

    Raises:
        UserError: the tokenizer cannot be loaded, or cannot map characters to tokens.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # a slow import that few workers need

    try:
        folder = model_cache.on_this_node(model_cache.find(model), weights=False)
        # mistral-common's tokenizer, which a tekken.json would select, has neither offsets nor a chat template
        tokenizer = AutoTokenizer.from_pretrained(folder, mistral_format=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise hub_access.explain(error, model) or UserError(
            f"the tokenizer of {model} cannot be loaded ({reason}); set {setting} to a folder or hub id with a "
            "tokenizer."
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"the tokenizer of {model} has no tokenizer.json, so trained tokens cannot be marked; convert it to a fast "
            "tokenizer."
        )
    if chat_template or tokenizer.chat_template:
        # get_chat_template selects the default one if the model has several
        tokenizer.chat_template = chat_template or tokenizer.get_chat_template()
    return tokenizer


def read_template(path: str | None) -> str | None:
    """Return the text of a chat template, from a file of this project or from a model. If `path` is None, return None.

    Raises:
        UserError: the file cannot be read, or the model has no template.
    """
    if path is None:
        return None
    file = settings.PROJECT / path
    if file.suffix != ".jinja" and not file.is_file():
        template = load_tokenizer(path, setting="chat_template").chat_template
        if not template:
            raise UserError(f"{path} has no chat template; correct chat_template in [preprocess].")
        return template
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the chat template {path} cannot be read ({error.strerror}); correct chat_template in [preprocess]."
        ) from None


def tokenizer_hash(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return a SHA-256 hash of everything that determines the tokens of a text, except the chat template."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    # an earlier call to the tokenizer may have enabled truncation or padding
    definition |= {"truncation": None, "padding": None}
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()


def padding_id(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the token that fills rows. Any token would do, because padding is neither trained nor attended to."""
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


def eos_ids(model: str, tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    """Return vLLM's stop tokens: those in generation_config.json or config.json, and the tokenizer's EOS token."""
    from transformers import AutoConfig, GenerationConfig

    folder = model_cache.on_this_node(model_cache.find(model), weights=False)
    ids: int | list[int] | None = None
    with contextlib.suppress(OSError, ValueError):
        ids = GenerationConfig.from_pretrained(folder).eos_token_id
    if ids is None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            ids = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).eos_token_id
    return {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}
