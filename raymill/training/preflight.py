"""Checks, before workers start, that the data fits the model and that a resumed run keeps its model, data and settings.

Settings that do not affect the results may change.
"""

import hashlib
import json
import math
from contextlib import suppress
from typing import Any, TypeVar

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from raymill import code_identity, settings, state_files
from raymill.data.options import Task
from raymill.data.tokenizer import load_tokenizer, tokenizer_hash
from raymill.errors import UserError
from raymill.model_config import context_length, text_config
from raymill.ray_support import hub_access, model_cache
from raymill.settings import inv
from raymill.training import storage, weights_check
from raymill.training.dataset import Manifest, TokenizerRecord, read_manifest
from raymill.training.flops import carries_state
from raymill.training.objectives import Objective, Supervised
from raymill.training.options import TrainOptions
from raymill.training.schedule import steps_of

Options = TypeVar("Options", bound=TrainOptions)
BALANCED = (1, 4 / 3)
"""Best ratios of the weights of all good and all bad answers, for kto."""

Identity = dict[str, Any]
"""The values that must not change when a run resumes, because its results depend on them."""

DECIDES_NUMBERS = {
    "global_batch_rows",
    "learning_rate",
    "reference_batch_rows",
    "warmup_steps",
    "min_lr_ratio",
    "schedule",
    "optimizer",
    "objective",
    "beta",
    "label_smoothing",
    "simpo_gamma",
    "desirable_weight",
    "undesirable_weight",
    "decay_share",
    "weight_decay",
    "max_grad_norm",
    "steps",
    "precision",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "rslora",
    "dora",
    "lora_dropout",
    "quantize_base",
    "seed",
}


DEFAULTS = {
    name: list(field.default) if isinstance(field.default, tuple) else field.default
    for name, field in TrainOptions.model_fields.items()
    if name in DECIDES_NUMBERS and not field.is_required()
}
"""What runs had that an older version started, which did not record all of these settings."""


def with_absolute_paths(options: Options) -> Options:
    """Return the options with absolute paths, because workers do not run in the driver's folder."""
    paths = {
        "model": model_cache.find(options.model),
        "data": settings.resolve(options.data),
        "output": settings.resolve(options.output),
    }
    return options.model_copy(update=paths)


def with_steps(options: Options) -> Options:
    """Return the options with the number of steps that `epochs` need.

    Raises:
        UserError: there are no packed rows.
    """
    if not options.epochs:
        return options
    rows = read_manifest(options.data).train.rows
    return options.model_copy(update={"steps": steps_of(options.epochs, rows, options.global_batch_rows)})


def check_packed(options: TrainOptions, objective: Objective | None = None) -> Identity:
    """Refuse packed data that does not fit the objective and the model. Return the identity of the run.

    Args:
        objective: what training minimizes. None: the cross-entropy of answers.
    """
    manifest, objective = read_manifest(options.data), objective or Supervised()
    check_task(options, manifest, objective.task)
    config = load_config(options.model)
    check_data(options, manifest)
    if options.patience and not manifest.eval.rows:
        raise UserError(
            f"patience needs evaluation rows, but {options.data} has none. Run preprocess with a larger --eval-share."
        )
    check_model(options.model, config, manifest)
    weights_check.check(options.model, as_reward_model=objective.output == "scores")
    for note in filter(None, (packing_note(options.model, config), balance_note(options, manifest))):
        print(note, flush=True)
    return identify(options, config, manifest.content_hash[:12])


def load_config(model: str) -> PreTrainedConfig:
    """Return the configuration of a model, given its folder, URI or hub id.

    Raises:
        UserError: the configuration or the generation configuration cannot be loaded.
    """
    try:
        folder = model_cache.on_this_node(model, weights=False)
        config = AutoConfig.from_pretrained(folder)
        with suppress(OSError):  # the file is optional
            GenerationConfig.from_pretrained(folder)
        return config
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise hub_access.explain(error, model) or UserError(
            f"cannot load the model {model} ({reason}). Correct the model's folder, URI or hub id."
        ) from None


def check_task(options: TrainOptions, manifest: Manifest, task: Task) -> None:
    """Refuse rows that were packed for another task than `task`."""
    made_for = manifest.task
    if made_for != task:
        again = inv(f"submit preprocess -- --task {task} --output", f"{options.data}-{task}")
        raise UserError(
            f"the rows in {options.data} were packed for the task {made_for}, but objective = {options.objective} "
            f"needs {task}. Pack rows for it: {again}"
        )


def check_data(options: TrainOptions, manifest: Manifest) -> None:
    """Refuse packed data without training rows, or with a tokenizer other than the model's."""
    check_tokenizer(options.model, options.data, manifest.tokenizer)
    if not manifest.train.rows:
        raise UserError(
            f"{options.data} has no training rows. Run preprocess on more input: {inv('submit preprocess')}"
        )


def check_tokenizer(model: str, data: str, made_with: TokenizerRecord) -> None:
    """Refuse rows that were made with a tokenizer other than the model's."""
    if made_with.hash != tokenizer_hash(load_tokenizer(model, made_with.chat_template)):
        raise UserError(
            f"the rows in {data} were made with the tokenizer of {made_with.model}, which differs from that of "
            f"{model}. Run preprocess with --model {model}, or use a model with the rows' tokenizer."
        )


def check_model(model: str, config: PreTrainedConfig, manifest: Manifest) -> None:
    """Refuse a model that has no embedding for a token of the rows, or whose context is shorter than the rows."""
    size = text_config(config).vocab_size
    if manifest.largest_id is None and manifest.tokenizer.vocabulary > size:
        raise UserError(
            f"the tokenizer of {model} has {manifest.tokenizer.vocabulary} tokens, but the model has embeddings for "
            f"only {size}, and the packed data does not say which tokens occur. Make it again: "
            f"{inv('submit preprocess -- --overwrite')}"
        )
    if (manifest.largest_id or 0) >= size:
        raise UserError(
            f"the rows contain the token id {manifest.largest_id}, but {model} has embeddings only for ids below "
            f"{size}. Remove the token from the input or from the model's tokenizer, or pass another --model."
        )
    check_context(model, config, manifest.sequence_length)


def check_context(model: str, config: PreTrainedConfig, sequence_length: int) -> None:
    """Refuse a model whose context is shorter than the rows."""
    longest = context_length(config) or sequence_length
    if sequence_length > longest:
        raise UserError(
            f"the rows have {sequence_length} tokens, but the context of {model} is {longest} tokens. "
            f"Run preprocess with --sequence-length {longest}."
        )


def packing_note(model: str, config: PreTrainedConfig) -> str:
    """Return a warning if the model has layers that carry a state from one document of a packed row to the next."""
    types = set(getattr(text_config(config), "layer_types", None) or ())
    stateful = sorted(kind for kind in types if carries_state(kind))
    if not stateful:
        return ""
    return f"note: in the {', '.join(stateful)} layers of {model}, the documents of a packed row influence each other"


def balance_note(options: TrainOptions, manifest: Manifest) -> str:
    """Return a warning if good and bad answers do not have the weights that eq. 8 of arXiv:2402.01306 recommends."""
    good = manifest.train.good_documents
    if good is None or options.objective != "kto":
        return ""
    bad = manifest.train.documents - good
    ratio = options.desirable_weight * good / max(1, options.undesirable_weight * bad)
    if BALANCED[0] <= ratio <= BALANCED[1]:
        return ""
    weight = math.sqrt(math.prod(BALANCED)) * options.undesirable_weight * bad / max(1, good)
    return (
        f"note: {options.data} has {good:,} good and {bad:,} bad answers, whose weights in the loss are {ratio:.2f} "
        f"to 1; kto works best between 1 and 1.33 to 1, for example with --desirable-weight {weight:.2f}"
    )


def identify(options: TrainOptions, config: PreTrainedConfig, data: str) -> Identity:
    """Return the identity of a run with these options. `data` is a string that identifies the rows."""
    return {
        "model": f"{options.model.rpartition('/')[2]} ({config_hash(config)})",
        "weights of the base model": f"fingerprint {weights_check.fingerprint(options.model)}",
        "data": data,
        "strategy": options.strategy,
        **options.model_dump(mode="json", include=DECIDES_NUMBERS),
    }


def claim(options: TrainOptions, identity: Identity) -> None:
    """Create the run's folder, or check that an existing run has the same identity. With `fresh`, delete that run.

    The identity includes the launcher, because Ray Train and torchrun cannot read each other's checkpoints. The
    manifest of the data is copied to the folder, because `inv report` reads it.

    Raises:
        UserError: the existing run has a different identity, or the file with its identity is damaged.
    """
    folder = f"{options.output}/{options.name}"
    text = storage.read_text(f"{folder}/run.json")
    if text is not None and options.fresh:
        storage.clear_folder(folder)
    elif text is not None:
        remedy = "If its settings are still the same, delete this file to resume the run; otherwise pass --fresh."
        existing = state_files.parse_or_refuse(text, Identity, f"{folder}/run.json", remedy)
        _refuse_another_identity(existing, identity, options.name)
    storage.write_text(f"{folder}/run.json", json.dumps(identity, indent=2) + "\n")
    if not options.stream and (manifest := storage.read_text(f"{options.data}/manifest.json")):
        storage.write_text(f"{folder}/data.json", manifest)


def _refuse_another_identity(existing: Identity, identity: Identity, name: str) -> None:
    existing = code_identity.OF_THE_LIBRARY | DEFAULTS | existing  # in runs of an older version
    for key, value in identity.items():
        if existing.get(key) != value:
            raise UserError(
                f"the run {name} was started with {key} = {existing.get(key)}, not {value}. Resume it with that "
                "value, use another --name, or start over with --fresh."
            )


def config_hash(config: PreTrainedConfig) -> str:
    """Return a hash of the architecture. The model's folder and the version of transformers do not affect it."""
    unrelated = ("_name_or_path", "transformers_version")
    architecture = {key: value for key, value in config.to_dict().items() if key not in unrelated}
    return hashlib.sha256(json.dumps(architecture, sort_keys=True, default=str).encode()).hexdigest()[:12]
