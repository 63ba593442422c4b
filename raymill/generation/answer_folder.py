"""The folder to which `generate` writes answers file by file. An interrupted run resumes from these files."""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileSystem, FileType

from raymill import state_files
from raymill.data.output import open_output
from raymill.errors import UserError
from raymill.output_lease import is_lease
from raymill.state_files import DamagedFile

ANSWERS, REJECTED = "answers", "rejected"
RECIPE = "recipe.json"
ROW_HASH = "row_hash"  # column with the hash of the row's content
PARTIAL = ".partial"  # suffix of an unfinished file
BAD_ROWS = pa.schema([("row", pa.binary()), ("reason", pa.string())])


@dataclass(frozen=True)
class AnswerFolder:
    """A folder of answers, at an absolute path or URI. Methods raise UserError if the folder cannot be used."""

    uri: str

    def begin(self, recipe: dict[str, Any], overwrite: bool) -> dict[str, str]:
        """Return the rows that are already answered with this recipe: their content hashes, keyed by id.

        Delete old rejected rows.

        `recipe` has the settings that determine an answer. With `overwrite`, all answers are deleted.
        """
        with open_output(self.uri) as (filesystem, folder):
            found = self._recipe(filesystem, folder)
            if overwrite:
                _delete(filesystem, f"{folder}/{ANSWERS}")
            elif found is not None:
                self._refuse_another_recipe(found, recipe)
            self._save(filesystem, f"{folder}/{RECIPE}", json.dumps(recipe, indent=2).encode())
            _delete(filesystem, f"{folder}/{REJECTED}")  # rows that are still bad are rejected again
            files = _complete_files(filesystem, f"{folder}/{ANSWERS}")
            return {row_id: row_hash for file in files for row_id, row_hash in _answered(filesystem, file)}

    def remove(self, ids: Collection[str]) -> None:
        """Remove the answers to these rows, one file at a time and each atomically."""
        if not ids:
            return
        with open_output(self.uri) as (filesystem, folder):
            for file in _complete_files(filesystem, f"{folder}/{ANSWERS}"):
                answers = _read(filesystem, file)
                kept = answers.filter(pc.invert(pc.is_in(answers["id"], pa.array(list(ids), pa.string()))))
                if not len(kept):
                    filesystem.delete_file(file)
                elif len(kept) < len(answers):
                    self._save(filesystem, file, _encode(kept))

    def save_answers(self, answers: pa.Table) -> None:
        """Write some answers atomically. A file with answers to the same rows is replaced."""
        self._save_table(f"{ANSWERS}/{_name(*answers['id'].to_pylist())}.parquet", answers)

    def save_rejected(self, origin: str, bad: list[dict[str, Any]]) -> None:
        """Write the bad rows of `origin`, a piece of the input."""
        self._save_table(f"{REJECTED}/{_name(origin)}.parquet", pa.Table.from_pylist(bad, BAD_ROWS))

    def count_rejected(self) -> Counter[str]:
        """Return the number of rejected rows for each reason."""
        with open_output(self.uri) as (filesystem, folder):
            files = _complete_files(filesystem, f"{folder}/{REJECTED}")
            tables = [_read(filesystem, file) for file in files]
        return Counter(reason for table in tables for reason in table["reason"].to_pylist())

    def _save_table(self, name: str, table: pa.Table) -> None:
        with open_output(self.uri) as (filesystem, folder):
            self._save(filesystem, f"{folder}/{name}", _encode(table))

    def _save(self, filesystem: FileSystem, path: str, content: bytes) -> None:
        filesystem.create_dir(path.rpartition("/")[0])
        with filesystem.open_output_stream(f"{path}{PARTIAL}") as file:
            file.write(content)
        filesystem.move(f"{path}{PARTIAL}", path)

    def _refuse_another_recipe(self, found: bytes, recipe: dict[str, Any]) -> None:
        remedy = "Pass --overwrite, or another --output."
        existing = state_files.parse_or_refuse(found, dict[str, Any], f"{self.uri}/{RECIPE}", remedy)
        if changed := [key for key in recipe if existing.get(key) != recipe[key]]:
            raise UserError(
                f"{self.uri} holds answers that were made with a different {' and a different '.join(changed)}; "
                "replace them with --overwrite, or pass another --output."
            )

    def _recipe(self, filesystem: FileSystem, folder: str) -> bytes | None:
        path = f"{folder}/{RECIPE}"
        if filesystem.get_file_info(path).type == FileType.NotFound:
            if _complete_files(filesystem, folder):
                raise UserError(f"{self.uri} holds other files; pass another --output, or remove them.")
            return None
        with filesystem.open_input_stream(path) as file:
            return file.read()


def _answered(filesystem: FileSystem, file: str) -> list[tuple[str, str]]:
    """Return the ids and content hashes of the rows that `file` answers.

    Delete a damaged file, so that its rows are answered again. Answers of earlier versions of this project have no
    content hash, which is returned as an empty string.
    """
    try:
        answers = _read(filesystem, file)
    except DamagedFile as error:
        print(error, flush=True)
        filesystem.delete_file(file)
        return []
    ids = answers["id"].to_pylist()
    hashes = answers[ROW_HASH].to_pylist() if ROW_HASH in answers.column_names else [""] * len(ids)
    return list(zip(ids, hashes, strict=True))


def _read(filesystem: FileSystem, file: str) -> pa.Table:
    with state_files.reading_parquet(file, "Its rows are answered again."):
        # all columns, because the answers may be damaged, too
        return pq.read_table(file, filesystem=filesystem, page_checksum_verification=True)


def _encode(table: pa.Table) -> bytes:
    content = io.BytesIO()
    pq.write_table(table, content, write_page_checksum=True)
    return content.getvalue()


def _complete_files(filesystem: FileSystem, folder: str) -> list[str]:
    """Return the complete files in a folder, which may not exist, without its lease."""
    found = filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
    files = [info for info in found if info.is_file and not is_lease(info.base_name)]
    return [info.path for info in files if not info.path.endswith(PARTIAL)]


def _delete(filesystem: FileSystem, folder: str) -> None:
    if filesystem.get_file_info(folder).type == FileType.Directory:
        filesystem.delete_dir(folder)


def _name(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
