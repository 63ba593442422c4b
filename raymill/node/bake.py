"""Packs this node's packages and stores them in the bucket, from which new nodes unpack them (see unpack.py).

`inv bake` runs this on the head, in the environment that the head's own setup commands have installed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import BotoCoreError, ClientError

from raymill.common import bucket, cluster_file
from raymill.node import unpack

PACKED = ("env", ".local/share/uv/python", ".local/bin")
"""Folders in the home folder: the environment, the interpreter that uv downloaded for it, and uv itself."""
PARTS = 16
"""Number of parts of an archive. A node downloads and unpacks all of them at once."""
DOLLARS_PER_GB = 0.023
"""Monthly price of S3 Standard in us-east-1 (aws.amazon.com/s3/pricing)."""


def main() -> None:
    """Pack and store the packages, and delete those that were stored for other pins."""
    started, file = time.monotonic(), cluster_file.load()
    store = Store(file.client("s3"), bucket.name(file))
    archive = unpack.prefix(f"{sys.version_info.major}.{sys.version_info.minor}")
    store.delete(archive + unpack.MANIFEST)
    files = sorted(find_files(Path.home()))
    parts = split(files, PARTS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        keys = [f"{archive}{number}.tar.zst" for number in range(len(parts))]
        for number, _ in enumerate(pool.map(store.upload, keys, parts), 1):
            print(f"stored part {number} of {len(parts)}: {time.monotonic() - started:.0f} s", flush=True)
    size = sum(path.lstat().st_size for path in files)
    folders = sorted({str(path.parent.relative_to(Path.home())) for path in files})
    store.put(archive + unpack.MANIFEST, json.dumps({"parts": len(parts), "bytes": size, "folders": folders}))
    stored = store.list()
    packed = sum(one["Size"] for one in stored if one["Key"].startswith(archive)) / 1e9
    print(
        f"stored {size / 1e9:.1f} GB of packages as {packed:.1f} GB in s3://{store.name}/{archive}, which costs about "
        f"{packed * DOLLARS_PER_GB:.2f} dollars per month. New nodes unpack them. `inv down` keeps them"
    )
    others = [one for one in stored if not one["Key"].startswith(archive)]
    for one in others:
        store.delete(one["Key"])
    if others:
        print(f"deleted {sum(one['Size'] for one in others) / 1e9:.1f} GB that were stored for other packages")


class Store:
    """The part of the bucket that holds packages."""

    def __init__(self, client: Any, name: str) -> None:
        self.name = name
        self._client = client

    def upload(self, key: str, files: list[Path]) -> None:
        """Store a compressed archive of these files. It is never on this node's disk."""
        home = Path.home()
        with tempfile.NamedTemporaryFile("w") as names:
            names.write("\0".join(str(path.relative_to(home)) for path in files))
            names.flush()
            command = ["tar", "--create", "--zstd", "--directory", home, "--no-recursion", "--null"]
            with subprocess.Popen([*command, "--files-from", names.name], stdout=subprocess.PIPE) as tar:
                self._client.upload_fileobj(tar.stdout, self.name, key)
        if tar.returncode:
            sys.exit("error: tar could not read all packages, as printed above")

    def put(self, key: str, text: str) -> None:
        self._client.put_object(Bucket=self.name, Key=key, Body=text.encode())

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self.name, Key=key)

    def list(self) -> list[dict[str, Any]]:
        """Return all stored objects, with `Key` and `Size`."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=unpack.FOLDER)
        return [one for page in pages for one in page.get("Contents", [])]


def find_files(home: Path) -> Iterator[Path]:
    """Yield the files and links to pack. Leave out compiled modules, which Python may be writing at the same time."""
    for packed in PACKED:
        for parent, folders, names in os.walk(home / packed):
            links = [name for name in folders if Path(parent, name).is_symlink()]
            folders[:] = [name for name in folders if name != "__pycache__"]
            yield from (Path(parent, name) for name in (*names, *links))


def split(files: list[Path], parts: int) -> list[list[Path]]:
    """Return the files in parts of about the same size. There are fewer parts if there are fewer files."""
    chosen: list[list[Path]] = [[] for _ in range(min(parts, len(files)))]
    sizes = [0] * len(chosen)
    for path in sorted(files, key=lambda one: one.lstat().st_size, reverse=True):
        smallest = sizes.index(min(sizes))
        chosen[smallest].append(path)
        sizes[smallest] += path.lstat().st_size + 512  # tar writes a header of 512 bytes for each file
    return chosen


if __name__ == "__main__":
    try:
        main()
    except (BotoCoreError, ClientError, S3UploadFailedError) as error:
        sys.exit(f"error: {error}")
