"""Reads the copies of logs that the nodes of all clusters keep in the bucket (see cluster/node/log_shipping.py)."""

from concurrent.futures import ThreadPoolExecutor

import botocore.exceptions

from cluster.common import bucket
from cluster.common.cluster_file import ClusterFile
from cluster.target import Copy

REQUESTS = 16
"""How many requests run at once."""


class SavedLogs:
    """The logs in the project's bucket, which need not exist."""

    def __init__(self, file: ClusterFile) -> None:
        self._client, self._bucket = file.client("s3"), bucket.name(file)

    def sessions(self) -> list[str]:
        """Return the prefix of each cluster's logs, the latest first. It contains the time of the cluster's start."""
        try:
            return sorted(self._below(bucket.LOGS), reverse=True)
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchBucket":
                return []
            raise

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

    def _below(self, prefix: str) -> list[str]:
        """Return the prefixes directly below another one."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix, Delimiter="/"
        )
        return [found["Prefix"] for page in pages for found in page.get("CommonPrefixes", [])]
