"""Unpacks the packages that `inv bake` has stored in the bucket. Setup commands run it before a node has any packages.

So it runs on the image's Python, imports only the standard library, and signs its requests to S3 itself.
"""

import hashlib
import hmac
import http.client
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from raymill.node import metadata

ENVIRONMENT = Path.home() / "env"
ON_NVME = Path("/opt/dlami/nvme/packages/env")
"""Where the environment is unpacked. ENVIRONMENT is a link to it, because an environment works at one path only."""
COMPLETE = ON_NVME.with_name("complete")
"""Written last. It names the archive, so that the environment is not unpacked again: Ray 2.60 runs each setup command
of a worker twice."""
PROJECT = Path(__file__).parents[2]
PINS = PROJECT / "requirements/cluster.txt"
SETTINGS = PROJECT / "settings.toml"
FOLDER = "environments/"
"""Prefix of the keys of all archives in the bucket."""
MANIFEST = "manifest.json"
"""Stored after all parts of an archive. Without it, the archive is incomplete."""
ATTEMPTS = 4
TIMEOUT_S = 30
MIB = 2**20


def main(project: str, python: str) -> None:
    """Unpack the archive for this node's pins. Exit with 1 if there is none or it cannot be used."""
    started, archive = time.monotonic(), prefix(python)
    if COMPLETE.exists() and COMPLETE.read_text() == archive and ENVIRONMENT.is_symlink():
        print("the packages are already unpacked")
        return
    clear()
    try:
        bucket = Bucket(project)
        manifest = _manifest(bucket, archive)
        if manifest is None:
            sys.exit("the bucket has no packages for these pins, so they will be installed. To store them: inv bake")
        ENVIRONMENT.symlink_to(ON_NVME)
        for folder in manifest["folders"]:  # before tar runs, because several tars cannot create one folder at once
            Path(ENVIRONMENT.parent, folder).mkdir(parents=True, exist_ok=True)
        parts = [f"{archive}{number}.tar.zst" for number in range(manifest["parts"])]
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(lambda key: _unpack(bucket, key), parts))
        subprocess.run([ENVIRONMENT / "bin/python", "-c", "import ray"], check=True)
        COMPLETE.write_text(archive)
    except (OSError, ValueError, KeyError, http.client.HTTPException, subprocess.SubprocessError) as error:
        clear()
        sys.exit(f"the packages in the bucket cannot be used ({error}), so they will be installed")
    gigabytes = manifest["bytes"] / 1e9
    print(f"unpacked {gigabytes:.1f} GB of packages from the bucket in {time.monotonic() - started:.0f} s")


def prefix(python: str) -> str:
    """Return the prefix of an archive's keys. It contains a digest of what the archive depends on."""
    depends_on = f"{PINS.read_text()}\n{python}\n{platform.machine()}\n{ENVIRONMENT}"
    return f"{FOLDER}{hashlib.sha256(depends_on.encode()).hexdigest()[:16]}/"


class Bucket:
    """The project's bucket, read with the credentials of this instance's role."""

    def __init__(self, project: str) -> None:
        identity = metadata.identity()
        self._region = identity["region"]
        role = metadata.read("iam/security-credentials/")
        self._credentials = json.loads(metadata.read(f"iam/security-credentials/{role}"))
        endpoint = os.environ.get("AWS_ENDPOINT_URL", f"https://s3.{self._region}.amazonaws.com")
        storage = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))["cluster"].get("storage", {})
        name = (
            storage.get("bucket") or f"{project}-{identity['accountId']}-{self._region}"
        )  # as in raymill/common/bucket.py
        self._url = f"{endpoint}/{name}/"

    def read(self, key: str) -> Iterator[bytes]:
        """Yield the content of an object. If the connection breaks, continue from there.

        Raises:
            OSError: there is no such object, or S3 does not answer.
        """
        received, size = 0, 1
        for attempt in range(ATTEMPTS):
            try:
                with self._open(key, received) as answer:
                    size = received + int(answer.headers["Content-Length"])
                    while chunk := answer.read(MIB):
                        received += len(chunk)
                        yield chunk
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    raise
            if received == size:
                return
            time.sleep(attempt)
        raise OSError(f"{key} ended after {received} bytes")

    def _open(self, key: str, first: int) -> Any:
        headers = sign(self._url + key, self._region, self._credentials, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
        request = urllib.request.Request(self._url + key, headers=headers | {"range": f"bytes={first}-"})
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def sign(url: str, region: str, credentials: dict[str, str], now: str) -> dict[str, str]:
    """Return the headers of a signed GET request to S3. `now` is the time, as 20260131T235959Z.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    """
    parts = urllib.parse.urlsplit(url)
    no_body = hashlib.sha256().hexdigest()
    headers = {
        "host": parts.netloc,
        "x-amz-content-sha256": no_body,
        "x-amz-date": now,
        "x-amz-security-token": credentials["Token"],
    }
    names = ";".join(headers)
    lines = [f"{name}:{value}" for name, value in headers.items()]
    request = "\n".join(["GET", parts.path, "", *lines, "", names, no_body])
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{credentials['SecretAccessKey']}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={credentials['AccessKeyId']}/{scope}"
    return headers | {"authorization": f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={signature}"}


def _manifest(bucket: Bucket, archive: str) -> dict[str, Any] | None:
    """Return the archive's manifest, or None if there is no complete archive."""
    try:
        return json.loads(b"".join(bucket.read(archive + MANIFEST)))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _unpack(bucket: Bucket, key: str) -> None:
    command = ["tar", "--extract", "--zstd", "--directory", str(ENVIRONMENT.parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as tar:
        assert tar.stdin
        assert tar.stderr
        for chunk in bucket.read(key):
            tar.stdin.write(chunk)
        tar.stdin.close()
        reason = tar.stderr.read().decode(errors="replace")
    if tar.returncode:
        raise OSError(f"{key}: {reason.strip().splitlines()[0] if reason else 'tar failed'}")


def clear() -> None:
    """Delete the environment, whether it was installed or unpacked, so that an incomplete one is never used."""
    COMPLETE.unlink(missing_ok=True)
    if ENVIRONMENT.is_symlink():
        ENVIRONMENT.unlink()
    for folder in (ENVIRONMENT, ON_NVME):
        shutil.rmtree(folder, ignore_errors=True)
    ON_NVME.mkdir(parents=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
