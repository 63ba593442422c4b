"""Open the folder that a job writes to."""

import contextlib
import errno
from collections.abc import Iterator

from pyarrow.fs import FileSystem

from raymill.errors import UserError


@contextlib.contextmanager
def open_output(uri: str) -> Iterator[tuple[FileSystem, str]]:
    """Yield the file system of an absolute path or URI, and the folder's path on it.

    Raises:
        UserError: this function or the `with` block cannot write to the folder, for example because the disk is full.
    """
    try:
        yield FileSystem.from_uri(uri)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(f"no space is left for {uri}; free some space, or pass another --output.") from None
        raise UserError(f"{uri} cannot be written ({error}); pass another --output.") from None
