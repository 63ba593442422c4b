"""A folder for the files of one process, which the next process deletes, however the first one ends."""

import contextlib
import shutil
import uuid
from pathlib import Path

from filelock import FileLock, Timeout


class PrivateFolder:
    """A new folder. The kernel releases its lock when this process ends."""

    def __init__(self, parent: Path) -> None:
        """Create a folder in `parent`, and delete those of processes that have ended."""
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(parent / "lock"):
            for lock in parent.glob("*.lock"):
                with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
                    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                    lock.unlink()
            self.path = parent / uuid.uuid4().hex
            self._lock = FileLock(f"{self.path}.lock", thread_local=False)
            self._lock.acquire()
            self.path.mkdir(mode=0o700)
