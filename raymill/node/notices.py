"""Sends notices to the webhook in the secret NOTIFY_WEBHOOK, in the JSON of Slack's incoming webhooks.

Many other chats accept it too. https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
"""

import json
import logging
import time
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from raymill.common import cluster_file
from raymill.common.cluster_file import ClusterFile, target

log = logging.getLogger(__name__)
SECRET = "NOTIFY_WEBHOOK"
TIMEOUT_S = 10.0


def send(text: str) -> None:
    """Send a notice, unless the secret has no value. Never raises an exception, because callers have more to do."""
    try:
        file = cluster_file.load()
        if url := _webhook(file):
            body = json.dumps({"text": f"{file.slug}: {text}"}).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    except Exception as error:
        # without the error's message: it may contain the URL, and whoever knows the URL can write to the chat
        log.warning("a notice was not sent (%s): %s", type(error).__name__, text)


def _webhook(file: ClusterFile) -> str | None:
    client = file.client("secretsmanager")
    try:
        return client.get_secret_value(SecretId=f"{file.slug}/{SECRET}")["SecretString"]
    except client.exceptions.ResourceNotFoundException:
        return None


class EndedJobs:
    """Finds the jobs that have ended since this object exists."""

    def __init__(self) -> None:
        self._since = time.time()
        self._told: set[str] = set()

    def news(self, jobs: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return a sentence for each job that has ended since the last call. `jobs` are as Ray describes them."""
        ended = [job for job in jobs if (job["end_time"] or 0) / 1000 >= self._since]
        new = [job for job in ended if job["submission_id"] not in self._told]
        self._told.update(job["submission_id"] for job in new)
        return [_sentence(job) for job in new]


def _sentence(job: Mapping[str, Any]) -> str:
    minutes = (job["end_time"] - (job["start_time"] or job["end_time"])) / 60_000
    name, owner = job["submission_id"], (job["metadata"] or {}).get("owner")
    ended = f"{name}{f' of {owner}' if owner else ''} has {job['status'].lower()} after {minutes:.0f} min"
    return f"{ended}. To see its log: inv logs --target {target()} {name}"
