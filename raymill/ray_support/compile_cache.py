"""The cache of compiled kernels that all processes on a machine share."""

import contextlib
import time
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

LINKING_S = 5  # while a library is linked, it is empty for less than a second


def remove_truncated() -> None:
    """Remove empty libraries from Inductor's cache on this machine.

    A linker leaves one if it is killed, for example with a replica. Inductor only checks whether the file exists
    (torch 2.13), so every later engine on this machine would die at its first request.
    """
    for library in Path(cache_dir()).rglob("*.so"):
        with contextlib.suppress(FileNotFoundError):  # another engine, which starts now too, has removed it
            found = library.stat()
            if not found.st_size and found.st_mtime < time.time() - LINKING_S:
                library.unlink()
