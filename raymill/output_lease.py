"""A lease on an output folder: while a job holds it, no other job writes to the folder, its parents or its subfolders.

The lease is a file in the folder. It names the job and its cluster. The job's driver creates, renews and deletes it.

- Ray knows which jobs of the same cluster have ended. Their leases are free at once.
- Leases of other clusters expire if they do not change for EXPIRY_S. The waiting job measures this time with its own
  clock, because the clocks of two machines may differ.
- If the driver cannot renew the lease, it ends its process before the lease expires. Ray then ends the job's workers.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from filelock import FileLock
from pydantic import BaseModel

from raymill import state_files
from raymill.errors import UserError
from raymill.settings import inv

LEASE = ".lease"
LOCK = ".lease.lock"  # locks the lease of a local folder while it is compared and changed

RENEW_INTERVAL_S = 10.0
GIVE_UP_S = 40.0  # a call takes up to 2 * CALL_TIMEOUT_S, so the job ends before EXPIRY_S
EXPIRY_S = 60.0
CALL_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 1.0
PROGRESS_INTERVAL_S = 10.0
RESUME = "Run the same command again; it resumes, or says which job writes there."
UNAVAILABLE = ("ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown")
"""Codes of S3's errors after which the same call may succeed."""

T = TypeVar("T")


def is_lease(name: str) -> bool:
    """Return whether a file belongs to a lease. Jobs that check or replace the content of a folder skip such files."""
    return name in (LEASE, LOCK)


class Holder(BaseModel):
    """Who holds a lease."""

    cluster: str
    """Name of a Ray session, which no two clusters share, or of a process of torchrun."""
    job: str
    """Id of the job, unique in the cluster."""
    name: str
    """The id with which the job was submitted, or its driver's process."""
    is_submitted: bool = False
    token: str = ""
    """Unique for each lease."""

    def is_same_job(self, other: "Holder | None") -> bool:
        return other is not None and (self.cluster, self.job) == (other.cluster, other.job)


HasEnded = Callable[[Holder], bool]


class Found(NamedTuple):
    """A lease that was read."""

    holder: Holder | None
    """None if the file is damaged, or not complete yet."""
    version: str
    """Changes with each renewal."""


class Unavailable(OSError):
    """The store cannot be used at the moment, so the same call may succeed later."""


class Store(Protocol):
    """Keeps leases. A path is that of a lease's folder. Methods raise OSError if the store cannot be used."""

    def read(self, path: str) -> Found | None:
        """Return the lease of a folder, or None."""
        ...

    def create(self, path: str, holder: Holder) -> str | None:
        """Create a lease and return its version, or None if there already is one."""
        ...

    def replace(self, path: str, holder: Holder, version: str) -> str | None:
        """Replace or renew a lease of this version, and return the new version, or None if it has another one."""
        ...

    def delete(self, path: str, version: str) -> None:
        """Delete a lease if it has this version."""
        ...

    def above(self, path: str) -> list[str]:
        """Return the folders above a folder."""
        ...

    def below(self, path: str) -> list[str]:
        """Return the folders below a folder that have a lease."""
        ...


class LocalStore:
    """Keeps leases in local folders. A renewal changes the file's time, so it needs no space on the disk."""

    def read(self, path: str) -> Found | None:
        try:
            with Path(path, LEASE).open("rb") as file:
                content, time_ns = file.read(), os.fstat(file.fileno()).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Found(state_files.parse(content, Holder), f"{time_ns} {content!r}")

    def create(self, path: str, holder: Holder) -> str | None:
        Path(path).mkdir(parents=True, exist_ok=True)
        with self._locked(path):
            if self.read(path):
                return None
            return self._write(path, holder)

    def replace(self, path: str, holder: Holder, version: str) -> str | None:
        with self._locked(path):
            found = self.read(path)
            if found is None or found.version != version:
                return None
            if found.holder != holder:
                return self._write(path, holder)
            os.utime(Path(path, LEASE))
            return self._version(path)

    def delete(self, path: str, version: str) -> None:
        with self._locked(path):
            if self._version(path) == version:
                Path(path, LEASE).unlink()
                Path(path, LOCK).unlink()  # a process that waits for it notices, and creates a new one

    def above(self, path: str) -> list[str]:
        return [str(parent) for parent in Path(path).parents]

    def below(self, path: str) -> list[str]:
        return [folder for folder, _, files in os.walk(path) if LEASE in files and folder != path]

    def _locked(self, path: str) -> FileLock:
        return FileLock(Path(path, LOCK), timeout=CALL_TIMEOUT_S)

    def _write(self, path: str, holder: Holder) -> str | None:
        Path(path, LEASE).write_text(holder.model_dump_json(), encoding="utf-8")
        return self._version(path)

    def _version(self, path: str) -> str | None:
        found = self.read(path)
        return found.version if found else None


class S3Store:
    """Keeps leases on S3, with conditional writes. A path is BUCKET/FOLDER. The version is the object's ETag."""

    def __init__(self) -> None:
        import boto3  # imported late: local folders do not need it
        from botocore.config import Config

        timeouts = Config(
            connect_timeout=CALL_TIMEOUT_S, read_timeout=CALL_TIMEOUT_S, retries={"total_max_attempts": 1}
        )
        self._client = boto3.client("s3", config=timeouts)
        self._renewals = 0

    def read(self, path: str) -> Found | None:
        answer = self._call(self._client.get_object, path)
        if answer is None:
            return None
        return Found(state_files.parse(answer["Body"].read(), Holder), answer["ETag"])

    def create(self, path: str, holder: Holder) -> str | None:
        return self._put(path, holder, IfNoneMatch="*")

    def replace(self, path: str, holder: Holder, version: str) -> str | None:
        return self._put(path, holder, IfMatch=version)

    def delete(self, path: str, version: str) -> None:
        self._call(self._client.delete_object, path, IfMatch=version)

    def above(self, path: str) -> list[str]:
        return [str(parent) for parent in PurePosixPath(path).parents if str(parent) != "."]

    def below(self, path: str) -> list[str]:
        bucket, _, folder = path.partition("/")
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=f"{folder}/" if folder else ""
        )
        with _as_os_error():
            keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        folders = [f"{bucket}/{key}".rpartition("/") for key in keys]
        return [folder for folder, _, name in folders if name == LEASE and folder != path]

    def _put(self, path: str, holder: Holder, **condition: str) -> str | None:
        self._renewals += 1  # the ETag is a hash of the content
        content = json.dumps(holder.model_dump() | {"renewals": self._renewals}).encode()
        answer = self._call(self._client.put_object, path, Body=content, **condition)
        if answer is not None:
            return answer["ETag"]
        found = self.read(path)  # an earlier call may have succeeded although its answer was lost
        return found.version if found and found.holder == holder else None

    def _call(self, call: Callable[..., Any], path: str, **arguments: Any) -> dict[str, Any] | None:
        """Call S3 for a folder's lease. Return None if the object does not exist, or the condition does not hold."""
        from botocore.exceptions import ClientError

        bucket, _, folder = path.partition("/")
        with _as_os_error():
            try:
                return call(Bucket=bucket, Key=f"{folder}/{LEASE}".lstrip("/"), **arguments)
            except ClientError as error:
                if error.response["Error"]["Code"] in ("NoSuchKey", "PreconditionFailed"):
                    return None
                raise


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise an OSError in place of boto3's errors."""
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    try:
        yield
    except HTTPClientError as error:  # no connection or no answer
        raise Unavailable(str(error)) from error
    except ClientError as error:
        code, status = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
        kind = PermissionError if status == 403 else Unavailable if status >= 500 or code in UNAVAILABLE else OSError
        raise kind(str(error)) from error
    except BotoCoreError as error:
        raise OSError(str(error)) from error


class Lease:
    """A lease that this process holds. A thread renews it."""

    def __init__(self, store: Store, path: str, holder: Holder, version: str) -> None:
        self._store, self._path, self._holder, self._version = store, path, holder, version
        self._renewed = time.monotonic()
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="lease", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Renew the lease. Call this before a write, because this process may have been suspended for a long time.

        Raises:
            UserError: another job may write to the folder.
        """
        with self._lock:
            started = time.monotonic()
            try:
                version = self._store.replace(self._path, self._holder, self._version)
                found = None if version else self._store.read(self._path)
            except OSError as error:
                if started - self._renewed < GIVE_UP_S:
                    return
                raise UserError(self._overdue(f" ({error})")) from None
            if version is None:
                reason = f"{_name(found)} has taken over" if found else "somebody has deleted"
                raise UserError(f"{reason} this job's lease on {self._where}, so this job stopped. {RESUME}")
            self._version, self._renewed = version, started

    def release(self) -> None:
        """Stop renewing the lease, and delete it. If that fails, it is free as soon as this job has ended."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            _retried(self._store.delete, self._path, self._version)

    def _renew_until_released(self) -> None:
        pause = RENEW_INTERVAL_S
        while not self._released.wait(pause):
            started = time.monotonic()
            seconds = max(2 * CALL_TIMEOUT_S, self._renewed + GIVE_UP_S + 2 * CALL_TIMEOUT_S - started)
            deadline = threading.Timer(seconds, lambda: _end_this_job(self._overdue("")))
            deadline.daemon = True
            deadline.start()
            try:
                self.confirm()
            except UserError as error:
                _end_this_job(str(error))
            finally:
                deadline.cancel()
            pause = RENEW_INTERVAL_S if self._renewed >= started else RETRY_INTERVAL_S

    def _overdue(self, reason: str) -> str:
        seconds = time.monotonic() - self._renewed
        return (
            f"this job could not renew its lease on {self._where} for {seconds:.0f} s{reason}, so it stopped before "
            f"another job may start. {RESUME}"
        )

    @property
    def _where(self) -> str:
        return _location(self._store, self._path)


class NoLease:
    """Stands for the lease of a job that already holds the lease on a folder above."""

    def confirm(self) -> None: ...

    def release(self) -> None: ...


@contextlib.contextmanager
def hold(location: str, option: str, me: Holder, has_ended: HasEnded) -> Iterator[Lease | NoLease]:
    """Hold the lease on a folder. A job that holds the lease on a folder above, as a trial of `tune`, needs no other.

    Args:
        location: an absolute path or an s3:// URI.
        option: the option that sets the folder, such as "--output".
        me: the job of this process.
        has_ended: returns whether a job of the same cluster has ended.

    Raises:
        UserError: another job writes to the folder, to one above or to one below, or the lease cannot be written.
    """
    store, path = _find(location, option)
    try:
        lease = _acquire(store, path, me, has_ended, option)
    except OSError as error:
        raise UserError(f"{location} cannot be written ({error}); pass another {option}.") from None
    try:
        yield lease
    finally:
        lease.release()


def _acquire(store: Store, path: str, me: Holder, has_ended: HasEnded, option: str) -> Lease | NoLease:
    above = [folder for folder in store.above(path) if (found := _peek(store, folder)) and me.is_same_job(found.holder)]
    if above:
        return NoLease()
    while not (version := _retried(store.create, path, me)):
        ended = _wait_until_free(store, path, me, has_ended, option)
        if ended and (version := _retried(store.replace, path, me, ended)):
            break
    lease = Lease(store, path, me, version)
    try:  # two jobs that start at the same time, one above the other, may both see the other and end
        for other in (*store.above(path), *_retried(store.below, path)):
            while _peek(store, other):
                if ended := _wait_until_free(store, other, me, has_ended, option):
                    _retried(store.delete, other, ended)
    except BaseException:
        lease.release()
        raise
    return lease


def _wait_until_free(store: Store, path: str, me: Holder, has_ended: HasEnded, option: str) -> str | None:
    """Return the version of a lease that is free, or None if the lease is gone.

    Raises:
        UserError: the job that holds the lease is running.
    """
    started = shown = time.monotonic()
    first = found = _retried(store.read, path)
    while first and found:
        where, seconds = _location(store, path), time.monotonic() - started
        if found.holder and found.holder.cluster == me.cluster:
            if has_ended(found.holder):
                break
            stop = f"stop it: {inv('stop', found.holder.name)}" if found.holder.is_submitted else "wait until it ends"
            raise UserError(f"{_name(found)} is writing to {where}; {stop}, or pass another {option}.")
        if found.version != first.version:
            raise UserError(
                f"{_name(found)}, on another cluster, is writing to {where}; wait until it ends, or pass another "
                f"{option}."
            )
        if seconds > EXPIRY_S:
            break
        if time.monotonic() >= shown:
            shown = time.monotonic() + PROGRESS_INTERVAL_S
            print(
                f"{where} was written by {_name(found)}, on another cluster; if that is gone, this job starts in "
                f"{EXPIRY_S - seconds:.0f} s",
                flush=True,
            )
        time.sleep(RETRY_INTERVAL_S)
        found = _retried(store.read, path)
    return found.version if found else None


def _find(location: str, option: str) -> tuple[Store, str]:
    """Return the store of a folder's lease, and the folder's path in it, which is the same for all ways to write it."""
    scheme, bucket, path, *_ = urlsplit(location)
    if scheme == "s3":
        return S3Store(), "/".join([bucket, *filter(None, path.split("/"))])
    if "://" not in location or scheme == "file":
        return LocalStore(), str(Path(unquote(path) if scheme == "file" else location).resolve())
    raise UserError(f"{location} is neither a folder nor an s3:// URI; pass another {option}.")


def _location(store: Store, path: str) -> str:
    return f"s3://{path}" if isinstance(store, S3Store) else path


def _name(found: Found) -> str:
    return found.holder.name if found.holder else "an unknown job"


def _peek(store: Store, path: str) -> Found | None:
    """Return the lease of a folder above. One that this job may not read is not of a job with the same permissions."""
    try:
        return _retried(store.read, path)
    except PermissionError:
        return None


def _retried(call: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a call. If the store cannot be used at the moment, call again for a while."""
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        try:
            return call(*arguments)
        except Unavailable:
            if time.monotonic() > deadline:
                raise
        time.sleep(RETRY_INTERVAL_S)


def _end_this_job(reason: str) -> None:
    """End this process at once, without `finally` blocks that would write. Ray ends the workers of its job."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    os._exit(1)
