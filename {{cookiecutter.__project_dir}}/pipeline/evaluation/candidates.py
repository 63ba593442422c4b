"""What is evaluated: a model, or adapters over one, wherever they are; refused before any worker starts."""

import json
from typing import NamedTuple

import settings
from pipeline.ray_support import model_cache
from pipeline.training import checkpoints, preflight, storage
from pipeline.training.dataset import Manifest
from settings import UserError


class Candidate(NamedTuple):
    """A model to evaluate, by what every node can read."""

    name: str
    """As it was given."""
    model: str
    """A folder, a URI or a hub id; with adapters, that of the model below them."""
    adapter: str | None
    """The folder or URI of LoRA adapters, as a training leaves them in the folder `adapter` of its run."""


def find(name: str) -> Candidate:
    """The model, or the adapters, of a Hugging Face folder, a URI or a hub id.

    Raises:
        UserError: it is a folder of a training that holds no model itself.
    """
    folder = settings.resolve(name).rstrip("/")
    _refuse_folders_of_a_training(name.rstrip("/"), folder)
    adapter = storage.read_text(f"{folder}/adapter_config.json")
    if adapter is None:
        return Candidate(name, model_cache.find(name), None)
    return Candidate(name, model_cache.find(json.loads(adapter)["base_model_name_or_path"]), folder)


def check(candidate: Candidate, data: str, manifest: Manifest) -> None:
    """Refuse what cannot be loaded, or does not fit the packed data in the folder `data`."""
    config = preflight.load_config(candidate.model)
    preflight.check_tokenizer(candidate.model, data, manifest.tokenizer)
    preflight.check_model(candidate.model, config, manifest.tokenizer.vocabulary, manifest.sequence_length)


def _refuse_folders_of_a_training(name: str, folder: str) -> None:
    """A run's folder, and those of its checkpoints, whose files only the same training can read."""
    signs = {checkpoints.STATE: ("a checkpoint", name.rpartition("/")[0]), "run.json": ("a run", name)}
    for file, (kind, run) in signs.items():
        if storage.read_text(f"{folder}/{file}") is not None:
            raise UserError(f"{name} is the folder of {kind}; give that of the model which it leads to: {run}/model")
