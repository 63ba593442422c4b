"""Files of a run by path or URI: what is written on rank 0, and what the driver reads before the start."""

import tempfile
from pathlib import Path

import pyarrow.fs
from pyarrow.fs import FileSelector, FileSystem, FileType


def read_text(location: str) -> str | None:
    """The file at a path or URI, or None where there is none."""
    filesystem, path = FileSystem.from_uri(location)
    if filesystem.get_file_info(path).type != FileType.File:
        return None
    with filesystem.open_input_stream(path) as file:
        return file.read().decode()


def write_text(location: str, text: str) -> None:
    """Write a file at a path or URI, and the folders above it."""
    filesystem, path = FileSystem.from_uri(location)
    filesystem.create_dir(path.rpartition("/")[0])
    with filesystem.open_output_stream(path) as file:
        file.write(text.encode())


def list_names(location: str) -> list[str]:
    """What is in a folder, at a path or URI, by name; nothing where there is no folder."""
    filesystem, path = FileSystem.from_uri(location)
    return sorted(entry.base_name for entry in filesystem.get_file_info(FileSelector(path, allow_not_found=True)))


def delete_folder(location: str) -> None:
    """Delete a folder, at a path or URI, and all that is in it."""
    filesystem, path = FileSystem.from_uri(location)
    filesystem.delete_dir(path)


def is_local(location: str) -> bool:
    """Whether `location` is a path of this machine rather than a URI."""
    return "://" not in location


class RunFolder:
    """A run's folder as a worker writes it: in place, or for a URI in a temporary folder that `publish` mirrors."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._temporary = None if is_local(location) else tempfile.TemporaryDirectory(prefix="run-")
        self.path = Path(self._temporary.name if self._temporary else location)
        self.path.mkdir(parents=True, exist_ok=True)

    def fetch(self, name: str) -> Path:
        """The path of a file that an earlier start of the run may have written."""
        if self._temporary and (text := read_text(f"{self._location}/{name}")) is not None:
            (self.path / name).write_text(text)
        return self.path / name

    def publish(self) -> None:
        """Make what this worker wrote so far outlive its machine."""
        if self._temporary:
            pyarrow.fs.copy_files(str(self.path), self._location)
