"""Reads the copies of logs that the nodes of all clusters keep in the bucket (see raymill/node/log_shipping.py)."""

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import botocore.exceptions

from raymill.common import bucket
from raymill.common.cluster_file import ClusterFile
from raymill.serving.accounting import PREFIX
from raymill.target import Copy

REQUESTS = 16
"""How many requests run at once."""


class SavedLogs:
    """The logs in the project's bucket."""

    def __init__(self, file: ClusterFile) -> None:
        """Raises `UserError` if there is no bucket."""
        bucket.require(file)
        self._client, self._bucket = file.client("s3"), bucket.name(file)

    def sessions(self) -> list[str]:
        """Return the prefix of each cluster's logs, the latest first. It contains the time of the cluster's start."""
        return sorted(self._below(bucket.LOGS), reverse=True)

    def read(self, key: str) -> Copy | None:
        """Return the copy with this key, or None if there is no such copy."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise
        return Copy(answer["Body"].read().decode(errors="replace"), answer["LastModified"])

    def of_all_nodes(self, session: str, name: str) -> list[Copy]:
        """Return the copy of the file NAME of each node that has one. `session` is one of `sessions`."""
        with ThreadPoolExecutor(REQUESTS) as threads:
            return list(filter(None, threads.map(self.read, [f"{node}{name}" for node in self._below(session)])))

    def access_logs(self, since: datetime.datetime) -> Iterator[str]:
        """Yield the copies of the served models' access logs that were made since then, of all clusters and nodes."""
        with ThreadPoolExecutor(REQUESTS) as threads:
            nodes = [node for found in threads.map(self._below, self.sessions()) for node in found]
            keys = [key for found in threads.map(lambda node: self._access_logs(node, since), nodes) for key in found]
            for first in range(0, len(keys), REQUESTS):  # in turn, because all together may not fit in memory
                yield from (copy.text for copy in threads.map(self.read, keys[first : first + REQUESTS]) if copy)

    def _access_logs(self, node: str, since: datetime.datetime) -> list[str]:
        """Return the keys of a node's access logs with a copy that was made since then."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{node}serve/{PREFIX}"
        )
        found = [one for page in pages for one in page.get("Contents", [])]
        return [one["Key"] for one in found if one["LastModified"] >= since]

    def _below(self, prefix: str) -> list[str]:
        """Return the prefixes directly below another one."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix, Delimiter="/"
        )
        return [found["Prefix"] for page in pages for found in page.get("CommonPrefixes", [])]
