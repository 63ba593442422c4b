"""Find the files of an input, which is a file, a folder, a glob or a URI."""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.fs
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType

from raymill.data import hub
from raymill.errors import UserError
from raymill.printable import printable

WILDCARD = re.compile(r"[*?[]")
PARTITION = re.compile(r"([^=/]+)=([^/]*)")
"""Matches the name of a folder with a partition, as Hive writes it: COLUMN=VALUE."""
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files of the `datasets` library that describe a data set and hold no rows."""
NAMES_SHOWN = 5


class InputFile(NamedTuple):
    """One file of an input."""

    path: str
    size: int
    """In bytes."""
    modified_ns: int
    """In nanoseconds since 1970."""
    values: str = "{}"
    """Columns that all of its rows have, as JSON."""
    deleted: bytes = b""
    """A compressed bit for each row: whether the row is deleted."""

    @property
    def suffix(self) -> str:
        return suffix(self.path)


class InputFiles(NamedTuple):
    """The files of one input."""

    name: str
    """The input as the user names it: an absolute path or a URI."""
    filesystem: FileSystem
    root: str
    """The folder that all paths start with."""
    files: list[InputFile]
    version: int | None = None
    """The version of a table."""
    table: str = "{}"
    """What readers of a table's files must know about it, as JSON. See `tables.Current`."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def deleted_rows(mask: np.ndarray) -> bytes:
    """Return a mask of rows in the form of `InputFile.deleted`."""
    return zlib.compress(np.packbits(mask).tobytes())


def suffix(path: str) -> str:
    """Return the suffix of a path. That of a compressed file has two parts, such as `.jsonl.gz`."""
    parts = PurePosixPath(path).suffixes
    return "".join(parts[-2:] if parts and parts[-1] in COMPRESSED else parts[-1:])


def find(name: str, suffixes: Sequence[str], section: str, *, recursive: bool = False) -> InputFiles:
    """Return the files with these suffixes that `name` refers to: a file, a folder's files, or the matches of a glob.

    Print which other files were found, and why they are not read.

    Args:
        name: An absolute path or a URI.
        suffixes: For example `.jsonl`.
        section: The section of settings.toml that names the input, for error messages.
        recursive: Whether a folder includes its subfolders.

    Raises:
        UserError: there is no such file, it cannot be read, or it belongs to a table with deleted rows.
    """
    on_hub = name.startswith(hub.SCHEME)
    try:
        filesystem, path = hub.open_uri(name) if on_hub else FileSystem.from_uri(name)
        root, nearby, found = _list(filesystem, path, recursive=recursive)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{name} cannot be read ({error}); correct input in [{section}], or pass --input.") from None
    files = sorted(
        InputFile(info.path, info.size, info.mtime_ns or 0, _partition_values(info.path, root))
        for info in found
        if info.is_file and suffix(info.path) in suffixes and PurePosixPath(info.path).name not in METADATA
    )
    read, known = [file.path for file in files] or [path], [info.path for info in nearby]
    if table := find_table(filesystem, read, known, root, min_depth=hub.REPOSITORY_DEPTH if on_hub else 1):
        is_part = table[0] != path.rstrip("/") and table[1] != "Hudi" and not on_hub
        instead = f"pass --input {uri(name, table[0])}, or " if is_part else ""
        raise UserError(
            f"{name} belongs to the {table[1]} table {table[0]}, where files of deleted rows remain; {instead}write "
            f"the table's current rows to parquet or JSONL files, and name those in [{section}], or pass --input."
        )
    skipped = _skipped(found, suffixes, root)
    if not files:
        raise UserError(
            f"no {_named(suffixes, 'or')} file at {name}{skipped and f', only {skipped}'}; correct "
            f"input in [{section}], or pass --input."
        )
    if skipped:
        print(printable(f"note: {name}: not read: {skipped}"), flush=True)
    return InputFiles(name, filesystem, root, files)


def _list(filesystem: FileSystem, path: str, *, recursive: bool) -> tuple[str, list[FileInfo], list[FileInfo]]:
    """Return the folder of all files that `path` refers to, what is in the folder, and what `path` refers to."""
    info = filesystem.get_file_info(path)
    if _is_folder(info):
        inside = _list_folder(filesystem, FileSelector(path, recursive=recursive))
        if not recursive and any(_is_folder(one) and PARTITION.fullmatch(one.base_name) for one in inside):
            inside = _list_folder(filesystem, FileSelector(path, recursive=True))
            return path, inside, [one for one in inside if _is_in_partition(one, path)]
        return path, inside, [one for one in inside if not (recursive and _is_folder(one))]
    root, wildcard = _fixed_folder(path), WILDCARD.search(path)
    if info.is_file or not wildcard:
        return root, [info], [info]
    selector = FileSelector(root, recursive="/" in path[wildcard.start() :], allow_not_found=True)
    inside = _list_folder(filesystem, selector)
    pattern = f"/{path.lstrip('/')}"  # a leading slash makes `match` compare whole paths
    return root, inside, [one for one in inside if PurePosixPath(f"/{one.path.lstrip('/')}").match(pattern)]


def _is_in_partition(info: FileInfo, root: str) -> bool:
    """Return whether this is a file of a partition, or something else that is not in a subfolder."""
    is_partition = _is_folder(info) and PARTITION.fullmatch(info.base_name)
    return not is_partition and all(map(PARTITION.fullmatch, _folders(info.path, root)))


def _partition_values(path: str, root: str) -> str:
    """Return the columns that the names of a file's folders give to its rows, as JSON."""
    found = map(PARTITION.fullmatch, _folders(path, root))
    pairs = [(unquote(match[1]), unquote(match[2])) for match in found if match]
    return json.dumps({column: value for column, value in pairs if value != NULL_PARTITION})


def _folders(path: str, root: str) -> tuple[str, ...]:
    """Return the names of the folders between `root` and a file."""
    return PurePosixPath(path).relative_to(root).parts[:-1]


def _list_folder(filesystem: FileSystem, selector: FileSelector) -> list[FileInfo]:
    """Return what is in a folder. Print the names that pyarrow cannot decode, because it cannot open these files."""
    found, unreadable = [], []
    for info in filesystem.get_file_info(selector):
        try:
            info.path  # noqa: B018
        except UnicodeDecodeError as error:
            unreadable.append(error.object.decode(errors="backslashreplace"))
        else:
            found.append(info)
    if unreadable:
        print(f"note: not read, because the name is not UTF-8: {_few(sorted(unreadable))}; rename them.", flush=True)
    return found


def _is_folder(info: FileInfo) -> bool:
    return info.type == FileType.Directory


def _skipped(found: Iterable[FileInfo], suffixes: Sequence[str], root: str) -> str:
    """Return the names of the files and folders that are not read, with the reasons."""
    names: dict[str, list[str]] = {}
    for info in sorted(found, key=lambda info: info.path):
        if reason := _reason(info, suffixes):
            names.setdefault(reason, []).append(str(PurePosixPath(info.path).relative_to(root)))
    return "; ".join(f"{_few(some)} ({reason})" for reason, some in names.items())


def _reason(info: FileInfo, suffixes: Sequence[str]) -> str:
    """Return why a file is not read, or an empty string if it is."""
    if info.type == FileType.NotFound:
        return ""
    if _is_folder(info):
        return "subfolders are not searched"
    if suffix(info.path) not in suffixes:
        if info.path.endswith(COMPRESSED):
            return "compressed"
        return f"only {_named(suffixes)} files are read"
    if PurePosixPath(info.path).name in METADATA:
        return "describes a data set"
    return "" if info.size else "empty"


def _named(suffixes: Sequence[str], conjunction: str = "and") -> str:
    """Return the suffixes of files that are not compressed, for a message."""
    plain = [one for one in suffixes if not one.endswith(COMPRESSED)]
    return f"{', '.join(plain[:-1])} {conjunction} {plain[-1]}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _fixed_folder(path: str) -> str:
    """Return the folder of a file, or for a glob, its deepest folder before the first wildcard."""
    parts = PurePosixPath(path).parts
    wildcards = [number for number, part in enumerate(parts) if WILDCARD.search(part)]
    return str(PurePosixPath(*parts[: min([*wildcards, len(parts) - 1])]))


def table_at(filesystem: FileSystem, folder: str) -> str | None:
    """Return the format of the table whose folder this is."""
    return _tables(_marker_paths(filesystem, PurePosixPath(folder))).get(PurePosixPath(folder))


MARKERS = {
    "_delta_log": ("", "Delta"),
    "metadata": (".metadata.json", "Iceberg"),
    "_versions": (".manifest", "Lance"),
    ".hoodie": ("", "Hudi"),
}
"""Maps a folder at the top of each table to how its files end, and to the format of the table."""


def find_table(
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


# the words by which the library `datasets` recognizes splits in the names of files and folders
TRAIN = {"train", "training"}
TEST = {"validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation"}
SEPARATORS = re.compile(r"[-._ 0-9/=]+")


def check_splits(source: InputFiles) -> None:
    """Print which files look like a test split. A file that the input names itself is never one.

    Raises:
        UserError: the input has both a train split and a test split.
    """
    if source.name.endswith(source.files[0].path):
        return
    words = {file.path: _words(file.path, source.root) for file in source.files}
    tests = [path for path in words if words[path] & TEST]
    trains = [path for path in words if words[path] & TRAIN and path not in tests]
    if not tests:
        return
    first = PurePosixPath(tests[0]).relative_to(source.root)
    some = f"{first} and {len(tests) - 1:,} more files" if len(tests) > 1 else str(first)
    if trains and source.version is not None:
        raise UserError(
            f"{source.name} has both a train split and what looks like a test split ({some}); write the rows of the "
            "train split to parquet files, and pass those as --input."
        )
    if trains:
        raise UserError(
            f"{source.name} has both a train split and what looks like a test split ({some}); pass --input "
            f"{uri(source.name, _pattern(trains, tests))}, and to train on both, add the others with --mix INPUT=1."
        )
    print(printable(f"note: {source.name}: trains on {some}, which looks like a test split"), flush=True)


def _words(path: str, root: str) -> set[str]:
    return set(SEPARATORS.split(str(PurePosixPath(path).relative_to(root)).lower()))


def _pattern(trains: list[str], tests: list[str]) -> str:
    """Return a glob that matches the train split and not the test split, or one file of the train split."""
    prefix = os.path.commonprefix(trains)  # noqa: RUF071 - a glob may begin within a name
    return trains[0] if len(trains) == 1 or any(path.startswith(prefix) for path in tests) else f"{prefix}*"


def uri(name: str, path: str) -> str:
    """Return the URI of a path on the file system of the input `name`."""
    scheme, separator, _ = name.rpartition("://")
    return f"{scheme}{separator}{path}"


def object_store_options() -> dict[str, str]:
    """Return options that allow plain HTTP if the S3 endpoint uses it, as in the tests."""
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    return {"allow_http": "true"} if plain else {}
