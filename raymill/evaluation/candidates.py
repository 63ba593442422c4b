"""Finds the models to evaluate, and checks that they fit the data before any worker starts."""

from typing import NamedTuple

from pydantic import BaseModel

from raymill import settings, state_files
from raymill.errors import UserError
from raymill.model_config import is_classifier
from raymill.ray_support import model_cache
from raymill.settings import inv
from raymill.training import checkpoint_check, preflight, storage, weights_check
from raymill.training.dataset import Manifest

CONFIG = "adapter_config.json"


class AdapterConfig(BaseModel):
    """The part of the adapters' configuration that names their base model."""

    base_model_name_or_path: str


class Candidate(NamedTuple):
    """A model to evaluate, at locations that every node can read."""

    name: str
    """The name that the user gave."""
    model: str
    """Folder, URI or hub id of the model, or of the base model if there are adapters."""
    adapter: str | None
    """Folder or URI of LoRA adapters, such as the `adapter` folder of a run. None if there are no adapters."""


def find(name: str) -> Candidate:
    """Return the model or adapters that `name` points to: a Hugging Face folder, a URI or a hub id.

    Raises:
        UserError: the name is the folder of a run or of a checkpoint, not of a model, or the adapters are damaged.
    """
    folder = settings.resolve(name).rstrip("/")
    _refuse_run_folders(name.rstrip("/"), folder)
    adapter = storage.read_text(f"{folder}/{CONFIG}")
    if adapter is None:
        return Candidate(name, model_cache.find(name), None)
    config = state_files.parse_or_refuse(adapter, AdapterConfig, f"{folder}/{CONFIG}", "Train them again.")
    return Candidate(name, model_cache.find(config.base_model_name_or_path), folder)


def check(candidate: Candidate, data: str, manifest: Manifest) -> None:
    """Raise UserError if a model cannot be loaded, or does not fit the packed data in the folder `data`."""
    config = preflight.load_config(candidate.model)
    preflight.check_tokenizer(candidate.model, data, manifest.tokenizer)
    preflight.check_model(candidate.model, config, manifest)
    weights_check.check(candidate.model, as_reward_model=is_classifier(config))
    if candidate.adapter:
        weights_check.check_adapter(candidate.model, candidate.adapter)


def are_reward_models(found: list[Candidate], manifest: Manifest) -> bool:
    """Return whether the models are reward models, which score answers instead of writing them.

    Raises:
        UserError: only some of them are, or the held-out rows are not pairs.
    """
    scoring = [candidate.name for candidate in found if is_classifier(preflight.load_config(candidate.model))]
    if scoring and len(scoring) < len(found):
        raise UserError(f"{scoring[0]} is a reward model, and others in --models are not; evaluate them separately.")
    if scoring and manifest.task != "preference":
        raise UserError(
            f"{scoring[0]} is a reward model, but the rows were packed for the task {manifest.task}. Pass the output "
            f"of {inv('submit preprocess -- --task preference')} as --data."
        )
    return bool(scoring)


def _refuse_run_folders(name: str, folder: str) -> None:
    """Raise UserError if `folder` is a run or a checkpoint, because `from_pretrained` cannot read their files."""
    markers = {checkpoint_check.STATE: ("a checkpoint", name.rpartition("/")[0]), "run.json": ("a run", name)}
    for file, (kind, run) in markers.items():
        if storage.read_text(f"{folder}/{file}") is not None:
            raise UserError(f"{name} is the folder of {kind}; evaluate its model instead: {run}/model")
