"""The folder that a packed data set is written to. It is finished once its manifest stands, which comes last."""

import contextlib
import errno
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs
from pyarrow.fs import FileSelector, FileType

from settings import UserError

FOLDERS = ("train", "eval", "rejected")
MANIFEST = "manifest.json"
MARK = "UNFINISHED"  # what lies beside it a stopped run of ours left, and may go; without it, it is somebody else's


@dataclass(frozen=True)
class Output:
    """A folder by its absolute path or URI; every method raises UserError where it cannot be used."""

    uri: str

    def holds(self, recipe: dict[str, Any]) -> bool:
        """Whether a finished data set of this recipe, the part of its manifest that decides the rest, is here."""
        manifest = self._manifest()
        return manifest is not None and recipe.items() <= manifest.items()

    def begin(self, overwrite: bool) -> None:
        """Clear what a stopped run left, or with `overwrite` a finished data set."""
        with self._opened() as (filesystem, folder):
            present = {info.base_name for info in filesystem.get_file_info(FileSelector(folder, allow_not_found=True))}
            if self._manifest() is not None and not overwrite:
                raise UserError(
                    f"{self.uri} holds a data set that was made from other input or with other settings; "
                    "replace it with --overwrite, or pass another --output."
                )
            if present and not present & {MANIFEST, MARK}:
                raise UserError(f"{self.uri} holds other files; pass another --output, or remove them.")
            self.save(MARK, b"")
            for name in present & {MANIFEST}:
                filesystem.delete_file(f"{folder}/{name}")
            for name in present & set(FOLDERS):
                filesystem.delete_dir(f"{folder}/{name}")

    def save(self, name: str, content: bytes | pa.Buffer) -> None:
        """Write one file, with the folder that it is in."""
        with self._opened() as (filesystem, folder):
            path = f"{folder}/{name}"
            filesystem.create_dir(path.rpartition("/")[0])
            with filesystem.open_output_stream(path) as file:
                file.write(content)

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, in one step, and with it finish the data set."""
        self.save(f"{MANIFEST}.partial", json.dumps(manifest, indent=2).encode())
        with self._opened() as (filesystem, folder):
            filesystem.move(f"{folder}/{MANIFEST}.partial", f"{folder}/{MANIFEST}")
            filesystem.delete_file(f"{folder}/{MARK}")

    def _manifest(self) -> dict[str, Any] | None:
        with self._opened() as (filesystem, folder):
            path = f"{folder}/{MANIFEST}"
            if filesystem.get_file_info(path).type == FileType.NotFound:
                return None
            with filesystem.open_input_stream(path) as file:
                return json.loads(file.read())

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[pyarrow.fs.FileSystem, str]]:
        """The file system and the folder's path on it."""
        try:
            yield pyarrow.fs.FileSystem.from_uri(self.uri)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise UserError(f"no space is left for {self.uri}; free some, or pass another --output.") from None
            raise UserError(f"{self.uri} cannot be written ({error}); pass another --output.") from None
