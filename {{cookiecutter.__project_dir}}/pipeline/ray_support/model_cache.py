"""Finds a model's files. A cluster downloads them once to the project's bucket; each node copies them to its disk."""

import hashlib
import os
import shutil
from pathlib import Path

import pyarrow.fs
from filelock import FileLock
from pyarrow.fs import FileSelector, FileSystem, FileType

import settings

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
COMPLETE = ".complete"  # file that marks a complete folder on a node's disk


def find(model: str) -> str:
    """Return a location of the model that every node can read: a URI or, without a bucket, a folder or hub id.

    On a cluster, the first call for a hub id copies the model into the bucket. Nodes read the model from the bucket,
    without the hub's rate limits, and always get the same revision.
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
    """Return a folder with the model's files. A `location` that is not a URI is returned unchanged.

    The first process on a node copies the files while the others wait. Without `weights`, only the configuration and
    the tokenizer are copied.
    """
    if "://" not in location:
        return location
    kind = "full" if weights else "config"
    folder = _node_folder() / kind / location.replace("://", "/") / version(location)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            _copy(location, folder, weights)
            (folder / COMPLETE).touch()
    return str(folder)


def _node_folder() -> Path:
    """Return the cache folder of this node. On a cluster, HF_HOME is on the NVMe disks (cluster.yaml)."""
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "project"


def _is_model(uri: str) -> bool:
    filesystem, path = FileSystem.from_uri(uri)
    return filesystem.get_file_info(f"{path}/config.json").type == FileType.File


def version(location: str) -> str:
    """Return a hash that changes whenever a file in the folder is rewritten, for example by a run that starts over."""
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
    from huggingface_hub import snapshot_download  # imported late: only the first download needs it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    print(f"copying {model} to {uri}, once for all jobs", flush=True)
    try:
        folder = snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise settings.UserError(
            f"{model} is neither in the project's bucket nor on the Hugging Face hub ({reason}). "
            "Check the model's name or, if the model is gated, add HF_TOKEN to the secrets."
        ) from None
    pyarrow.fs.copy_files(folder, uri)
