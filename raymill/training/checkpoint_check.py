"""Finds out whether a checkpoint is complete, and whether its files still hold what was written."""

import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar
from zipfile import ZipFile

from pydantic import BaseModel
from torch.distributed.checkpoint import FileSystemReader

from raymill import state_files
from raymill.training.ranking import Best

STATE = "state.json"
FSDP_FOLDER = "fsdp"
T = TypeVar("T")


class State(BaseModel):
    """The content of state.json."""

    step: int
    world_size: int
    best: Best | None = None
    """None: an older version saved the checkpoint, or `train_hf`."""


def inventory_name(rank: int) -> str:
    """Return the name of the file with the names and sizes of the files that a rank wrote."""
    return f"files-{rank:05d}.json"


def checksums_name(rank: int) -> str:
    """Return the name of the file with the checksums of the files that a rank wrote, if their formats have none."""
    return f"checksums-{rank:05d}.json"


def seal(folder: Path, rank: int, state: State, *, has_checksums: bool = True) -> None:
    """Write the state, on rank 0, and the inventory of the files that this rank wrote to `folder`.

    Args:
        has_checksums: whether the formats of all files have checksums. If not, they are written to another file.
    """
    if rank == 0:
        (folder / STATE).write_text(state.model_dump_json())
    if not has_checksums:
        checksums = {name: _checksum(folder / name) for name in sizes(folder)}
        (folder / checksums_name(rank)).write_text(json.dumps(checksums))
    (folder / inventory_name(rank)).write_text(json.dumps(sizes(folder)))


def sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file in bytes, keyed by the file's path in `folder`."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def read_state(folder: Path) -> State | None:
    """Return the state, or None if its file is missing or damaged."""
    return _parse(folder / STATE, State)


def first_problem(folder: Path, rank: int, world_size: int) -> str:
    """Describe the first file that is missing, incomplete or damaged. Return "" if there is none.

    Each rank checks the sizes of all files, but the content of only its share of the files.
    """
    if (state := read_state(folder)) is None:
        return _missing_or_damaged(folder / STATE)
    found, names, checksums = sizes(folder), list[str](), dict[str, int]()
    for writer in range(state.world_size):
        inventory = _parse(folder / inventory_name(writer), dict[str, int])
        if inventory is None:
            return _missing_or_damaged(folder / inventory_name(writer))
        for name, size in inventory.items():
            if found.get(name) != size:
                return f"{name} has {found.get(name, 0)} of {size} bytes"
        names += inventory
        if checksums_name(writer) in inventory:
            if (listed := _parse(folder / checksums_name(writer), dict[str, int])) is None:
                return _missing_or_damaged(folder / checksums_name(writer))
            checksums |= listed
    for name in sorted(names)[rank::world_size]:
        file = folder / name
        if _checksum(file) != checksums[name] if name in checksums else is_damaged(file):
            return f"{name} is damaged"
    return ""


def is_damaged(file: Path) -> bool:
    """Return whether a file of the right size has wrong content. After a crash, some of it may be zeros.

    `torch.save` writes zip archives with checksums, which `torch.load` does not compare.
    """
    try:
        return any(ZipFile(archive).testzip() for archive in _archives(file))
    except Exception:  # a damaged pickle may raise any error
        return True


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as opened:
        while part := opened.read(2**20):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _parse(file: Path, kind: type[T]) -> T | None:
    return state_files.parse(file.read_bytes(), kind) if file.is_file() else None


def _missing_or_damaged(file: Path) -> str:
    return f"{file.name} is {'damaged' if file.is_file() else 'missing'}"


def _archives(file: Path) -> Iterator[IO[bytes]]:
    """Yield the zip archives in a file: one in a `.pt` file, and one per tensor in a file of FSDP's."""
    if file.suffix == ".pt":
        with file.open("rb") as opened:
            yield opened
    elif file.parent.name == FSDP_FOLDER:
        parts = FileSystemReader(file.parent).read_metadata().storage_data.values()
        with file.open("rb") as opened:
            for part in parts:
                if part.relative_path == file.name:
                    opened.seek(part.offset)
                    yield io.BytesIO(opened.read(part.length))
