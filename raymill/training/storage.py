"""Reads and writes the files of a run, by path or URI."""

import os
import tempfile
import uuid
from pathlib import Path

import pyarrow.fs
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

from raymill.output_lease import is_lease


def read_text(location: str) -> str | None:
    """Return the content of a file, or None if it does not exist."""
    content = read_bytes(location)
    return None if content is None else content.decode(errors="replace")  # a damaged file may hold any bytes


def read_bytes(location: str) -> bytes | None:
    """Return the content of a file, or None if it does not exist."""
    filesystem, path = FileSystem.from_uri(location)
    if filesystem.get_file_info(path).type != FileType.File:
        return None
    with filesystem.open_input_stream(path) as file:
        return file.read()


def write_text(location: str, text: str) -> None:
    """Write a file, and create the folders above it."""
    write_bytes(location, text.encode())


def write_bytes(location: str, content: bytes) -> None:
    """Write a file, and create the folders above it."""
    filesystem, path = FileSystem.from_uri(location)
    filesystem.create_dir(path.rpartition("/")[0])
    with filesystem.open_output_stream(path) as file:
        file.write(content)


def replace_bytes(location: str, content: bytes) -> None:
    """Write a file as a whole, while others may read or write it.

    On a disk, a reader gets all of the old or of the new content. On S3, one that reads in parts may get a mixture.
    """
    filesystem, path = FileSystem.from_uri(location)
    if not isinstance(filesystem, LocalFileSystem):
        write_bytes(location, content)  # the object appears once it is whole
        return
    folder, _, name = path.rpartition("/")
    partial = f"{folder}/.{name}.{uuid.uuid4().hex}"
    try:
        write_bytes(partial, content)
        os.replace(partial, path)
    except BaseException:
        delete_file(partial)
        raise


def delete_file(location: str) -> None:
    """Delete a file if it exists."""
    filesystem, path = FileSystem.from_uri(location)
    if filesystem.get_file_info(path).type == FileType.File:
        filesystem.delete_file(path)


def list_names(location: str) -> list[str]:
    """Return the sorted names in a folder, without its lease, or an empty list if the folder does not exist."""
    filesystem, path = FileSystem.from_uri(location)
    names = (entry.base_name for entry in filesystem.get_file_info(FileSelector(path, allow_not_found=True)))
    return sorted(name for name in names if not is_lease(name))


def delete_folder(location: str) -> None:
    """Delete a folder and its content."""
    filesystem, path = FileSystem.from_uri(location)
    filesystem.delete_dir(path)


def clear_folder(location: str) -> None:
    """Delete the content of a folder, without its lease."""
    filesystem, path = FileSystem.from_uri(location)
    for entry in filesystem.get_file_info(FileSelector(path)):
        if entry.type == FileType.Directory:
            filesystem.delete_dir(entry.path)
        elif not is_lease(entry.base_name):
            filesystem.delete_file(entry.path)


def is_local(location: str) -> bool:
    """Return whether `location` is a path, not a URI."""
    return "://" not in location


class RunFolder:
    """A worker's view of the run's folder. For a URI it is a temporary folder, which `publish` copies to the URI."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._temporary = None if is_local(location) else tempfile.TemporaryDirectory(prefix="run-")
        self.path = Path(self._temporary.name if self._temporary else location)
        self.path.mkdir(parents=True, exist_ok=True)

    def fetch(self, name: str) -> Path:
        """Return the local path of a file. If the run's folder is a URI and has the file, download it first."""
        if self._temporary and (text := read_text(f"{self._location}/{name}")) is not None:
            (self.path / name).write_text(text)
        return self.path / name

    def publish(self) -> None:
        """If the run's folder is a URI, upload all files that this worker wrote."""
        if self._temporary:
            pyarrow.fs.copy_files(str(self.path), self._location)
