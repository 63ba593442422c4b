"""The cache of compiled kernels that all processes on a machine share."""

import contextlib
import time
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

LINKING_S = 5  # a library is linked in less than a second
ELF = b"\x7fELF"


def remove_truncated() -> None:
    """Remove libraries without an ELF header from Inductor's cache on this machine.

    A linker leaves one if it is killed, for example with a replica: it writes the header after the code. Inductor only
    checks whether the file exists (torch 2.13), so every later engine on this machine would die at its first request.
    """
    for library in Path(cache_dir()).rglob("*.so"):
        with contextlib.suppress(FileNotFoundError):  # another engine, which starts now too, has removed it
            found = library.stat()
            with library.open("rb") as file:
                is_whole = file.read(len(ELF)) == ELF
            if not is_whole and found.st_mtime < time.time() - LINKING_S:
                library.unlink()
