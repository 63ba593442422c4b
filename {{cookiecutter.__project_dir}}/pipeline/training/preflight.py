"""What is refused before any worker starts: data that does not fit the model, and a run that began otherwise."""

import hashlib
import json
from typing import Any, TypeVar

from transformers import AutoConfig, PreTrainedConfig

import settings
from pipeline.data.tokenizer import load_tokenizer, tokenizer_hash
from pipeline.ray_support import model_cache
from pipeline.training import storage
from pipeline.training.dataset import Manifest, TokenizerRecord, read_manifest
from pipeline.training.options import TrainOptions
from settings import UserError

Options = TypeVar("Options", bound=TrainOptions)

Identity = dict[str, Any]
"""What makes a run the same run: with another value, its checkpoints would not lead to the same numbers."""

DECIDES_NUMBERS = {
    "global_batch_rows",
    "learning_rate",
    "reference_batch_rows",
    "warmup_steps",
    "min_lr_ratio",
    "weight_decay",
    "max_grad_norm",
    "steps",
    "precision",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "quantize_base",
    "seed",
}


def with_absolute_paths(options: Options) -> Options:
    """Workers do not run where the driver does."""
    paths = {
        "model": model_cache.find(options.model),
        "data": settings.resolve(options.data),
        "output": settings.resolve(options.output),
    }
    return options.model_copy(update=paths)


def check_packed(options: TrainOptions) -> Identity:
    """Refuse packed data and a model that do not fit; returns what the run on them is."""
    manifest = read_manifest(options.data)
    config = load_config(options.model)
    check_data(options, manifest)
    check_model(options.model, config, manifest.tokenizer.vocabulary, manifest.sequence_length)
    return identify(options, config, manifest.content_hash[:12])


def load_config(model: str) -> PreTrainedConfig:
    """The architecture of a Hugging Face folder or hub id.

    Raises:
        UserError: nothing can be loaded from there.
    """
    try:
        return AutoConfig.from_pretrained(model_cache.on_this_node(model, weights=False))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the model {model} cannot be loaded ({reason}); correct it in settings.toml, or on the command line."
        ) from None


def check_data(options: TrainOptions, manifest: Manifest) -> None:
    """Refuse packed data without training rows, or made with another tokenizer than the model's."""
    check_tokenizer(options.model, options.data, manifest.tokenizer)
    if not manifest.train.rows:
        raise UserError(f"{options.data} holds no training rows; run preprocess on more input.")


def check_tokenizer(model: str, data: str, made_with: TokenizerRecord) -> None:
    """Refuse rows that were made with another tokenizer than the model's."""
    if made_with.hash != tokenizer_hash(load_tokenizer(model, made_with.chat_template)):
        raise UserError(
            f"the rows in {data} were made with the tokenizer of {made_with.model}, which is not that of {model}; "
            f"run preprocess with --model {model}, or take a model with that tokenizer."
        )


def check_model(model: str, config: PreTrainedConfig, vocabulary: int, sequence_length: int) -> None:
    """Refuse a model with fewer tokens than its tokenizer, or that reads shorter rows than the data has."""
    if vocabulary > config.vocab_size:
        raise UserError(
            f"the tokenizer of {model} has {vocabulary} tokens and its model knows {config.vocab_size}; they are not "
            "of one model: correct the folder, or name another in settings.toml, or on the command line."
        )
    longest = getattr(config, "max_position_embeddings", None) or sequence_length
    if sequence_length > longest:
        raise UserError(
            f"the rows have {sequence_length} tokens and {model} reads {longest} at most; "
            f"run preprocess with --sequence-length {longest}."
        )


def identify(options: TrainOptions, config: PreTrainedConfig, data: str) -> Identity:
    """The identity of the run that `options` ask for; `data` identifies the rows."""
    return {
        "model": f"{options.model.rpartition('/')[2]} ({_config_hash(config)})",
        "data": data,
        "strategy": options.strategy,
        **options.model_dump(include=DECIDES_NUMBERS),
    }


def claim(options: TrainOptions, identity: Identity) -> None:
    """Make the run's folder, or find it begun with the same identity, to which its launcher belongs where it has one:
    neither reads the other's checkpoints. Copies the manifest of the data for `inv report`.

    Raises:
        UserError: it was begun with another.
    """
    folder = f"{options.output}/{options.name}"
    text = storage.read_text(f"{folder}/run.json")
    if text is not None and options.fresh:
        storage.delete_folder(folder)
    elif text is not None:
        _refuse_another_run(json.loads(text), identity, options.name)
    storage.write_text(f"{folder}/run.json", json.dumps(identity, indent=2) + "\n")
    if not options.stream and (manifest := storage.read_text(f"{options.data}/manifest.json")):
        storage.write_text(f"{folder}/data.json", manifest)


def _refuse_another_run(begun: Identity, identity: Identity, name: str) -> None:
    for key, value in identity.items():
        if begun.get(key) != value:
            raise UserError(
                f"the run {name} was begun with {key} = {begun.get(key)}, not {value}: go on with that, take another "
                "--name, or start it over with --fresh."
            )


def _config_hash(config: PreTrainedConfig) -> str:
    """Of the architecture alone: neither of the folder that it was read from, nor of who wrote it."""
    about_the_file = ("_name_or_path", "transformers_version")
    described = {key: value for key, value in config.to_dict().items() if key not in about_the_file}
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:12]
