"""The access log: a line of JSON for each request with a valid key. It contains no key and no content.

On AWS, raymill/node/log_shipping.py copies the files to the bucket, like the other logs of Serve. On this machine,
ACCESS_LOGS names the folder, because Ray's own logs end with the cluster.
"""

import datetime
import json
import logging
import os
import time
from pathlib import Path

from raymill.job_context import JobContext
from raymill.serving.accounting import RequestRecord

PREFIX = "access-"
MAX_FILE_BYTES = 4 * 2**20
"""Then a new file starts. A changed file is copied to the bucket as a whole, and only up to a size."""
MAX_FILES = 500
"""When a new file starts, the oldest of more files are deleted, so that a disk cannot fill up."""
MAX_TEXT = 200
"""Maximum characters of the model and the route, which a client chooses."""
WARNING_INTERVAL_S = 60.0

log = logging.getLogger("ray.serve")


class AccessLog:
    """The access log of one replica."""

    def __init__(self, folder: Path) -> None:
        """`folder` is used unless ACCESS_LOGS names another one."""
        self._folder = Path(JobContext.current().access_logs or folder)
        self._size = MAX_FILE_BYTES
        self._warned_at = -WARNING_INTERVAL_S

    def write(self, record: RequestRecord) -> None:
        """Write the line of a request that has ended."""
        started = datetime.datetime.fromtimestamp(record.started_at, datetime.UTC)
        line = json.dumps(
            {
                "time": started.isoformat(timespec="milliseconds"),
                "key": record.key,
                "model": record.model[:MAX_TEXT],
                "route": record.route[:MAX_TEXT],
                "status": record.status,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "completion_tokens": record.completion_tokens,
                "first_s": record.first_s and round(record.first_s, 4),
                "total_s": round(record.elapsed_s(), 4),
            }
        )
        try:
            if self._size >= MAX_FILE_BYTES:
                self._start_file()
            self._size += self._file.write(line.encode() + b"\n")
        except OSError as error:  # a full disk must not stop the server
            if time.monotonic() - self._warned_at >= WARNING_INTERVAL_S:
                self._warned_at = time.monotonic()
                log.warning(f"could not write to the access log in {self._folder}: {error}")

    def _start_file(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        self._file = (self._folder / name).open("ab", buffering=0)  # unbuffered, so that a dying replica loses no line
        self._size = 0
        for old in sorted(self._folder.glob(f"{PREFIX}*.log"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)
