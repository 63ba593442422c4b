"""Where a model's files are: fetched once a cluster into the project's bucket, and once a node onto its disk."""

import hashlib
import os
import shutil
from pathlib import Path

import pyarrow.fs
from filelock import FileLock
from pyarrow.fs import FileSelector, FileSystem, FileType

import settings

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
COMPLETE = ".complete"  # in a folder on a node's disk, once every file is there


def find(model: str) -> str:
    """A model as every node can read it: a folder of this machine, a URI, or, on one machine, a hub id.

    On a cluster a hub id is fetched into the bucket by whoever asks first, so that nodes read it from there: no hub
    limits them, and a revision stays what it was.
    """
    path = settings.resolve(model)
    if "://" not in path:
        return path if os.path.isdir(path) else model
    if _is_model(path):
        return path
    mirror = settings.resolve(f"models/{model}")
    if not _is_model(mirror):
        _mirror(model, mirror)
    return mirror


def on_this_node(location: str, *, weights: bool = True) -> str:
    """A folder with the model's files; `location` itself where it is no URI.

    The first process of a node copies them, others wait. Without `weights` only what describes the model is copied:
    configuration and tokenizer.
    """
    if "://" not in location:
        return location
    kind = "whole" if weights else "described"
    folder = _node_folder() / kind / location.replace("://", "/") / version(location)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            _copy(location, folder, weights)
            (folder / COMPLETE).touch()
    return str(folder)


def _node_folder() -> Path:
    """On the node's NVMe disks: cluster.yaml sets HF_HOME there."""
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "project"


def _is_model(uri: str) -> bool:
    filesystem, path = FileSystem.from_uri(uri)
    return filesystem.get_file_info(f"{path}/config.json").type == FileType.File


def version(location: str) -> str:
    """Another one when a file is written again: a run that starts over has other weights of the same name."""
    filesystem, path = FileSystem.from_uri(location)
    files = [(file.path, file.size, file.mtime_ns) for file in filesystem.get_file_info(FileSelector(path))]
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()[:12]


def _copy(uri: str, folder: Path, weights: bool) -> None:
    filesystem, path = FileSystem.from_uri(uri)
    for file in filesystem.get_file_info(FileSelector(path, recursive=True)):
        if file.type == FileType.File and (weights or not file.path.endswith(WEIGHTS)):
            target = folder / os.path.relpath(file.path, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.fs.copy_files(file.path, str(target), source_filesystem=filesystem)


def _mirror(model: str, uri: str) -> None:
    from huggingface_hub import snapshot_download  # here: only the first fetch needs it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    print(f"fetching {model} into {uri}, once for this cluster", flush=True)
    try:
        folder = snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise settings.UserError(
            f"{model} is neither in the project's bucket nor on the Hugging Face hub ({reason}); "
            "correct model in settings.toml, or add HF_TOKEN to the secrets for a gated one."
        ) from None
    pyarrow.fs.copy_files(folder, uri)
