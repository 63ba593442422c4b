"""Read data sets from the Hugging Face hub through pyarrow."""

import re
from typing import TYPE_CHECKING, Any, cast

import pyarrow.fs

from raymill.errors import UserError
from raymill.ray_support import hub_access

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

SCHEME = "hf://"
REPOSITORY_DEPTH = 3  # parts of a path that name a repository: datasets/OWNER/NAME


def open_uri(uri: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the hub as a file system, and the path of `uri` in it.

    If `uri` names a whole data set, return the path of its train split, or of its only split, in parquet format.

    Raises:
        OSError: the data set has no such files.
        UserError: the hub does not let this machine read the data set; or there is no configuration `default` or no
            split `train`, and there are several others or none.
    """
    from huggingface_hub import HfFileSystem  # only inputs on the hub need it

    hub, path = HfFileSystem(), uri.removeprefix(SCHEME)
    if repository := re.match(r"datasets/([^/@]+/[^/@]+)", path):
        hub_access.check(repository[1], "dataset")
    if re.fullmatch(r"datasets/[^/@]+/[^/@]+", path):
        path = _only_folder(hub, _only_folder(hub, f"{path}@~parquet", "default"), "train")
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(hub)), path


def _only_folder(hub: "HfFileSystem", folder: str, preferred: str) -> str:
    """Return the subfolder `preferred`, or the only subfolder.

    Raises:
        UserError: there is no subfolder `preferred`, and there are several others or none.
    """
    entries = cast("list[dict[str, Any]]", hub.ls(folder, detail=True))
    folders = [entry["name"] for entry in entries if entry["type"] == "directory"]
    candidates = [path for path in folders if path.endswith(f"/{preferred}")] or folders
    if len(candidates) == 1:
        return candidates[0]
    if not folders:
        raise UserError(
            f"{SCHEME}{folder} is empty: the hub has not converted this data set to parquet; name its files with "
            "--input."
        )
    names = ", ".join(path.rpartition("/")[2] for path in folders)
    raise UserError(f"{SCHEME}{folder} has {names}; name one: --input {SCHEME}{folders[0]}")
