"""Finds a model's files. A cluster downloads them once to the project's bucket; each node copies them to its disk."""

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from pyarrow import NativeFile
from pyarrow.fs import FileSelector, FileSystem, FileType

from raymill import settings
from raymill.errors import UserError
from raymill.ray_support import hub_access

SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
NOT_NEEDED = ["consolidated*", "original/*"]  # the same weights again, in the format of the model's authors
COMPLETE = ".complete"  # file that marks a complete folder on a node's disk
MIRRORED = ".mirrored"  # file that marks a complete copy of a hub's model in the bucket

PART_BYTES = 16 * 2**20
"""Bytes of a file that one request reads."""

REQUESTS = 16
"""Requests at once. S3 answers each with 85 to 90 MB/s, so about 15 fill a network card of 10 Gb/s, says the page
"Performance design patterns for Amazon S3" of its user guide. Arrow's S3 client has up to 25 connections."""

UPLOAD_BYTES = 160 * 2**20
"""Bytes of a file that an upload keeps in main memory: two parts of 10 MiB for each of Arrow's 8 threads. Arrow's
`copy_files` keeps everything that is not uploaded yet."""


def find(model: str, retries: int = hub_access.RETRIES) -> str:
    """Return a location of the model that every node can read: a URI or, without a bucket, a folder or hub id.

    On a cluster, the first call for a hub id copies the model into the bucket. Nodes read the model from the bucket,
    without the hub's rate limits, and always get the same revision. The copy is used only if it is complete; otherwise,
    for example because a job was killed, the next call makes it again. `retries` is for the first question to the hub.

    Raises:
        UserError: there is no folder `model`, and the hub does not let this machine read such a model.
    """
    path = settings.resolve(model)
    if "://" not in path:
        if os.path.isdir(path):
            return path
        hub_access.check(model, retries=retries)
        return model
    if _has_file(path, "config.json"):
        return path
    mirror = settings.resolve(f"models/{model}")
    if not _has_file(mirror, MIRRORED):
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
    folder = node_folder() / kind / location.replace("://", "/") / version(location)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            copy_folder(location, folder, weights=weights)
            (folder / COMPLETE).touch()
    return str(folder)


def node_folder() -> Path:
    """Return the cache folder of this node. On a cluster, HF_HOME is on the NVMe disks (cluster.yaml)."""
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "project"


def _has_file(uri: str, name: str) -> bool:
    filesystem, path = FileSystem.from_uri(uri)
    return filesystem.get_file_info(f"{path}/{name}").type == FileType.File


def version(location: str) -> str:
    """Return a hash that changes whenever a file in the folder is rewritten, for example by a run that starts over."""
    filesystem, path = FileSystem.from_uri(location)
    files = [(file.path, file.size, file.mtime_ns) for file in filesystem.get_file_info(FileSelector(path))]
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()[:12]


def copy_folder(location: str, folder: Path, *, weights: bool = True) -> None:
    """Copy a folder's files to this machine. Large files are read in parts, with several requests at once."""
    filesystem, path = FileSystem.from_uri(location)
    files = [
        file.path
        for file in filesystem.get_file_info(FileSelector(path, recursive=True))
        if file.type == FileType.File and (weights or not file.path.endswith(WEIGHTS))
    ]
    with ThreadPoolExecutor(REQUESTS) as pool:
        parts = []
        for file, source in zip(files, pool.map(filesystem.open_input_file, files), strict=True):
            target = folder / os.path.relpath(file, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
            parts += [(source, target, start) for start in range(0, source.size(), PART_BYTES)]
        list(pool.map(lambda part: _copy_part(*part), parts))  # a list, because only reading the results raises errors


def _copy_part(source: NativeFile, target: Path, start: int) -> None:
    with target.open("r+b") as file:
        file.seek(start)
        file.write(source.read_at(PART_BYTES, start))


def download(model: str) -> str:
    """Download a model from the Hugging Face hub, unless it is in the cache. Return its folder.

    Raises:
        UserError: the hub has no such model, or refuses it, or does not answer.
    """
    try:
        folder = snapshot_download(model, allow_patterns=[*SMALL_FILES, "*.safetensors"], ignore_patterns=NOT_NEEDED)
        if not any(Path(folder).glob("*.safetensors")):
            snapshot_download(model, allow_patterns="pytorch_model*.bin")
        return folder
    except (httpx2.HTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise hub_access.explain(error, model) or UserError(
            f"{model} is neither a folder in the project's bucket nor the id of a model. Correct the name, for example "
            f"to models/{model}."
        ) from None


def _mirror(model: str, uri: str) -> None:
    hub_access.check(model)
    print(f"copying {model} to {uri}, once for all jobs", flush=True)
    folder = download(model)
    if not _has_file(uri, MIRRORED):  # unless another job has copied the model in the meantime
        _upload(Path(folder), uri)


def _upload(folder: Path, uri: str) -> None:
    """Copy a folder to the bucket, and mark the copy as complete."""
    for file in sorted(filter(Path.is_file, folder.rglob("*"))):
        copy_file(file, f"{uri}/{file.relative_to(folder)}")
    filesystem, path = FileSystem.from_uri(uri)
    filesystem.open_output_stream(f"{path}/{MIRRORED}").close()


def copy_file(file: Path, location: str) -> None:
    """Copy a file to a path or URI in an existing folder. Arrow uploads several parts at once."""
    filesystem, path = FileSystem.from_uri(location)
    with file.open("rb") as source, filesystem.open_output_stream(path) as stream:
        while batch := source.read(UPLOAD_BYTES):
            stream.write(batch)
            stream.flush()  # waits until S3 has the batch
