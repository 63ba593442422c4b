"""The folder that `preprocess` writes to. The manifest is written last, so a folder with a manifest is complete."""

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow.fs import FileSelector, FileType

from raymill import state_files
from raymill.data.output import open_output
from raymill.data.row_formats import PUBLISHED
from raymill.errors import UserError
from raymill.output_lease import is_lease

SUBFOLDERS = ("train", "eval", "rejected", "dropped", "samples", "reference")
MANIFEST = "manifest.json"
MARKER = "UNFINISHED"  # exists while `preprocess` writes; without it and without a manifest, the files are the user's


@dataclass(frozen=True)
class PackedFolder:
    """A folder of packed data, at an absolute path or URI. Methods raise UserError if the folder cannot be used."""

    uri: str

    def is_complete(self, configuration: dict[str, Any]) -> bool:
        """Return whether the folder has a complete data set whose manifest contains this configuration."""
        manifest = self._manifest()
        if manifest is None:
            return False
        of_older_versions = {"formats": PUBLISHED, "filters": None}
        return configuration.items() <= (of_older_versions | manifest).items()

    def begin(self, overwrite: bool) -> None:
        """Mark the folder as unfinished. Delete what an interrupted run or, with `overwrite`, a complete run wrote."""
        with open_output(self.uri) as (filesystem, folder):
            found = filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
            present = {info.base_name for info in found if not is_lease(info.base_name)}
            if MANIFEST in present and not overwrite:
                if self._manifest() is None:
                    raise UserError(f"{self.uri}/{MANIFEST} is damaged; pass --overwrite, or another --output.")
                raise UserError(
                    f"{self.uri} holds a data set that was made from other input or with other settings; "
                    "replace it with --overwrite, or pass another --output."
                )
            if present and not present & {MANIFEST, MARKER}:
                raise UserError(f"{self.uri} holds other files; pass another --output, or remove them.")
            self.save(MARKER, b"")
            for name in present & {MANIFEST}:
                filesystem.delete_file(f"{folder}/{name}")
            for name in present & set(SUBFOLDERS):
                filesystem.delete_dir(f"{folder}/{name}")

    def save(self, name: str, content: bytes | pa.Buffer) -> None:
        """Write one file. Create its folder if it does not exist."""
        with open_output(self.uri) as (filesystem, folder):
            path = f"{folder}/{name}"
            filesystem.create_dir(path.rpartition("/")[0])
            with filesystem.open_output_stream(path) as file:
                file.write(content)

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest atomically, which completes the data set."""
        self.save(f"{MANIFEST}.partial", json.dumps(manifest, indent=2).encode())
        with open_output(self.uri) as (filesystem, folder):
            filesystem.move(f"{folder}/{MANIFEST}.partial", f"{folder}/{MANIFEST}")
            filesystem.delete_file(f"{folder}/{MARKER}")

    def _manifest(self) -> dict[str, Any] | None:
        """Return the manifest, or None if it is missing or damaged."""
        with open_output(self.uri) as (filesystem, folder):
            path = f"{folder}/{MANIFEST}"
            if filesystem.get_file_info(path).type == FileType.NotFound:
                return None
            with filesystem.open_input_stream(path) as file:
                return state_files.parse(file.read(), dict[str, Any])
