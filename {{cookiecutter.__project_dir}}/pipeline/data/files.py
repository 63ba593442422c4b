"""Find the files of an input, which is a file, a folder, a glob or a URI."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import pyarrow as pa
import pyarrow.fs
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType

from pipeline.data import hub
from settings import UserError

WILDCARD = re.compile(r"[*?[]")


class InputFile(NamedTuple):
    """One file of an input."""

    path: str
    size: int
    """In bytes."""
    modified_ns: int
    """In nanoseconds since 1970."""

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix


class InputFiles(NamedTuple):
    """The files of one input."""

    name: str
    """The input as the user names it: an absolute path or a URI."""
    filesystem: FileSystem
    root: str
    """The folder that all paths start with."""
    files: list[InputFile]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def find(name: str, suffixes: Sequence[str], section: str, *, recursive: bool = False) -> InputFiles:
    """Return the files with these suffixes that `name` refers to: a file, a folder's files, or the matches of a glob.

    Args:
        name: An absolute path or a URI.
        suffixes: For example `.jsonl`.
        section: The section of settings.toml that names the input, for error messages.
        recursive: Whether a folder includes its subfolders.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    try:
        filesystem, path = hub.open_uri(name) if name.startswith(hub.SCHEME) else FileSystem.from_uri(name)
        is_folder = filesystem.get_file_info(path).type == FileType.Directory
        found = (
            filesystem.get_file_info(FileSelector(path, recursive=recursive))
            if is_folder
            else _matches(filesystem, path)
        )
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{name} cannot be read ({error}); correct input in [{section}], or pass --input.") from None
    files = sorted(
        InputFile(info.path, info.size, info.mtime_ns or 0)
        for info in found
        if info.is_file and PurePosixPath(info.path).suffix in suffixes
    )
    if not files:
        raise UserError(
            f"no {', '.join(suffixes[:-1])} or {suffixes[-1]} file at {name}; correct input in [{section}], or pass "
            "--input."
        )
    return InputFiles(name, filesystem, path if is_folder else _fixed_folder(path), files)


def _matches(filesystem: FileSystem, path: str) -> list[FileInfo]:
    """Return the file at `path`, or the matches if `path` is a glob."""
    info = filesystem.get_file_info(path)
    wildcard = WILDCARD.search(path)
    if info.is_file or not wildcard:
        return [info]
    base = path[: wildcard.start()].rpartition("/")[0]
    selector = FileSelector(base, recursive="/" in path[wildcard.start() :], allow_not_found=True)
    pattern = f"/{path.lstrip('/')}"  # a leading slash makes `match` compare whole paths
    return [
        info for info in filesystem.get_file_info(selector) if PurePosixPath(f"/{info.path.lstrip('/')}").match(pattern)
    ]


def _fixed_folder(path: str) -> str:
    """Return the folder of a file, or for a glob, its deepest folder before the first wildcard."""
    parts = PurePosixPath(path).parts
    wildcards = [number for number, part in enumerate(parts) if WILDCARD.search(part)]
    return str(PurePosixPath(*parts[: min([*wildcards, len(parts) - 1])]))
