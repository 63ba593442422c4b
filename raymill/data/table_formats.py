"""Recognize tables whose folders also hold the files of deleted and superseded rows."""

import contextlib
from collections.abc import Iterable
from pathlib import PurePosixPath

from pyarrow.fs import FileSelector, FileSystem, FileType

MARKERS = {
    "_delta_log": ("", "Delta"),
    "metadata": (".metadata.json", "Iceberg"),
    "_versions": (".manifest", "Lance"),
    ".hoodie": ("", "Hudi"),
}
"""Maps a folder at the top of each table to how its files end, and to the format of the table."""


def find(
    filesystem: FileSystem, read: Iterable[str], listed: Iterable[str], folder: str, *, min_depth: int = 1
) -> tuple[str, str] | None:
    """Return the folder and the format of a table that one of the files or folders `read` belongs to.

    Args:
        filesystem: Where the files are.
        read: Paths below `folder`, or `folder` itself.
        listed: Paths that are known to exist below `folder`.
        folder: The folder with all paths. It may be part of a table.
        min_depth: Folders with fewer parts in their path cannot be listed.
    """
    above = [one for one in (PurePosixPath(folder), *PurePosixPath(folder).parents) if len(one.parts) >= min_depth]
    nearby = [path for one in above for path in _marker_paths(filesystem, one)]
    tables = _tables([*listed, *nearby])
    for path in read if tables else ():
        for one in (PurePosixPath(path), *PurePosixPath(path).parents):
            if table := tables.get(one):
                return str(one), table
    return None


def _marker_paths(filesystem: FileSystem, folder: PurePosixPath) -> list[str]:
    """Return the markers in a folder, and their files. A folder that may not be read has none."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for info in filesystem.get_file_info([f"{folder}/{marker}" for marker in MARKERS]):
            files = filesystem.get_file_info(FileSelector(info.path, allow_not_found=True))
            found += [info.path, *(file.path for file in files)] if info.type == FileType.Directory else []
    return found


def _tables(paths: Iterable[str]) -> dict[PurePosixPath, str]:
    """Return the format of each table that has a marker among `paths`."""
    found = {}
    for path in paths:
        parts = PurePosixPath(path).parts
        for marker in MARKERS.keys() & parts:
            ending, table = MARKERS[marker]
            if path.endswith(ending):
                found[PurePosixPath(*parts[: parts.index(marker)])] = table
    return found
