"""Replaces files as a whole, and reads files that this project wrote earlier.

A crash may have left a file empty, cut off or full of zeros.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from raymill.errors import UserError

T = TypeVar("T")


class DamagedFile(UserError):
    """A file does not hold what was written."""


def replace(file: Path, text: str) -> None:
    """Replace the content of a file as a whole: no process reads half of it, and a full disk leaves the old content.

    Several processes may do so at once. The file keeps its mode and, if root replaces it, its owner. A link stays a
    link. Only this user can read a new file.
    """
    file = file.resolve()
    partial = partial_name(file)
    try:
        partial.touch(0o600)
        partial.write_text(text, encoding="utf-8")
        if file.exists():
            old = file.stat()
            with suppress(PermissionError):  # only root may give files to others
                os.chown(partial, old.st_uid, old.st_gid)
            partial.chmod(old.st_mode)
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def partial_name(file: Path) -> Path:
    """Return where `replace` first writes the content: a name that no other process or thread uses."""
    return file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}")


def parse(content: str | bytes, kind: type[T]) -> T | None:
    """Return the value in a JSON file, or None if the file is damaged: it is not JSON, or its value is not a `kind`."""
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError:
        return None


def parse_or_refuse(content: str | bytes, kind: type[T], location: str, remedy: str) -> T:
    """Return the value in the JSON file at `location`.

    Raises:
        DamagedFile: the file is damaged. The message ends with `remedy`.
    """
    value = parse(content, kind)
    if value is None:
        raise DamagedFile(f"{location} is damaged, perhaps by a crash or a full disk. {remedy}")
    return value


@contextmanager
def reading_parquet(location: str, remedy: str) -> Iterator[None]:
    """Raise a DamagedFile if pyarrow cannot read a file because it is missing or damaged, and not because of a network.

    The message ends with `remedy`.
    """
    try:
        yield
    except FileNotFoundError:
        raise DamagedFile(f"{location} is missing. {remedy}") from None
    except (OSError, ValueError) as error:  # pyarrow raises both for wrong content, an OSError without an error number
        if isinstance(error, OSError) and (error.errno or "AWS Error" in str(error)):
            raise
        reason = str(error).strip().splitlines()[0]
        raise DamagedFile(f"{location} is damaged and cannot be read ({reason}). {remedy}") from None
