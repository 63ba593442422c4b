"""Test that a chat receives the notices, and that a notice harms nothing else."""

import http.server
import io
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sleeping import in_this_thread

from raymill.common import bucket, cluster_file, instances
from raymill.network import free_ports
from raymill.node import gpu_use, notices, watchdog_head, watchdog_worker

FILE = cluster_file.load()
JOB = {"submission_id": "finetune-1", "status": "RUNNING", "start_time": 0, "end_time": None, "metadata": None}


class Chat(http.server.BaseHTTPRequestHandler):
    """Receives notices as Slack does. The path is the secret."""

    received: list[tuple[str, str | None, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.received.append((self.path, self.headers["Content-Type"], body))
        self.send_response(200 if self.path == "/T0/secret" else 403)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def chat(s3: str) -> Iterator[list[tuple[str, str | None, Any]]]:
    """Return what a chat has received, and store its webhook as the secret."""
    Chat.received = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store(f"http://127.0.0.1:{server.server_port}/T0/secret")
        yield Chat.received
        server.shutdown()
    forget()


def store(url: str) -> None:
    forget()
    FILE.client("secretsmanager").create_secret(Name=f"{FILE.slug}/{notices.SECRET}", SecretString=url)


def forget() -> None:
    client = FILE.client("secretsmanager")
    client.delete_secret(SecretId=f"{FILE.slug}/{notices.SECRET}", ForceDeleteWithoutRecovery=True)


def texts(chat: list[tuple[str, str | None, Any]]) -> list[str]:
    return [body["text"] for _, _, body in chat]


def test_a_notice_has_the_form_that_chats_accept(chat: list[tuple[str, str | None, Any]]) -> None:
    notices.send("all is well")
    assert chat == [("/T0/secret", "application/json", {"text": f"{FILE.slug}: all is well"})]


def test_without_the_secret_nothing_is_sent(chat: list[Any], log: io.StringIO) -> None:
    forget()
    notices.send("all is well")
    assert chat == []
    assert "a notice" not in log.getvalue()


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/secret", "{chat}/not-the-secret", "ftp:secret", "secret"])
def test_a_notice_that_cannot_be_sent_is_logged_without_the_url(chat: list[Any], url: str, log: io.StringIO) -> None:
    stored = FILE.client("secretsmanager").get_secret_value(SecretId=f"{FILE.slug}/{notices.SECRET}")["SecretString"]
    store(url.format(port=free_ports(1)[0], chat=stored.rpartition("/T0")[0]))
    notices.send("all is well")
    (shown,) = [line for line in log.getvalue().splitlines() if line.startswith(notices.__name__)]
    assert "a notice was not sent" in shown
    assert shown.endswith(": all is well")
    assert "secret" not in log.getvalue()


def test_each_end_of_a_job_is_told_once() -> None:
    before = JOB | {"submission_id": "evaluate-0", "status": "SUCCEEDED", "end_time": (time.time() - 9) * 1000}
    ended = notices.EndedJobs()
    assert ended.news([before, JOB]) == []
    now = (time.time() + 1) * 1000
    failed = JOB | {"status": "FAILED", "start_time": now - 150_000, "end_time": now}
    quick = JOB | {
        "submission_id": "typo-2",
        "status": "FAILED",
        "end_time": now,
        "metadata": {"owner": "ada"},
    }  # between two calls
    first, second = ended.news([before, failed, quick])
    assert first == "finetune-1 has failed after 2 min. To see its log: inv logs --target aws finetune-1"
    assert second.startswith("typo-2 of ada has failed after")
    assert ended.news([before, failed, quick]) == []


def test_a_limit_is_told_before_the_head_ends(chat: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[list[str]] = []
    monkeypatch.setattr(watchdog_head, "stop_autoscaler", lambda: None)
    monkeypatch.setattr(instances, "living", lambda file: [])
    monkeypatch.setattr(bucket, "leave_note", lambda file, reason: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: ended.append([*texts(chat), *command]))
    monkeypatch.setattr(time, "sleep", in_this_thread(_over))
    with pytest.raises(Over):
        watchdog_head.end_cluster(FILE, "the limit of 2 hours is reached")
    assert ended[0][0].startswith(f"{FILE.slug}: the cluster shuts itself down: the limit of 2 hours is reached. You")
    assert "until you run: inv down --target aws" in ended[0][0]
    assert "shutdown" in ended[0]


class Over(Exception):
    """Ends a function that would never return."""


def _over(seconds: float) -> None:
    raise Over


def test_the_loss_of_a_spot_machine_is_told(chat: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_worker, "answers", lambda head: False)
    monkeypatch.setattr(watchdog_worker, "spot_notice", lambda: "2026-01-01T10:00:00Z")
    monkeypatch.setattr(watchdog_worker, "drain", lambda head, notice, deadline_s: True)
    monkeypatch.setattr(time, "sleep", in_this_thread(_over))
    with pytest.raises(Over):
        watchdog_worker.watch("10.0.0.1")
    (text,) = texts(chat)
    assert "back at 2026-01-01T10:00:00Z" in text


def test_idle_gpus_are_told_once_until_they_work_again(
    chat: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = [*[3] * 20, 90, *[3] * 14, 50, *[10] * 20]
    samples = iter([["2026-01-01T10:00:00,0,0,1,2", f"2026-01-01T10:00:00,1,{percent},1,2"] for percent in busy])
    monkeypatch.setattr(gpu_use, "FILE", tmp_path / "gpu_use.csv")
    monkeypatch.setattr(gpu_use, "LAST_FILE", tmp_path / "gpu_use.json")
    monkeypatch.setattr(gpu_use, "sample", lambda: next(samples))
    monkeypatch.setattr(time, "sleep", in_this_thread(lambda seconds: None))
    with pytest.raises(StopIteration):
        gpu_use.record()
    assert len(chat) == 2
    assert "for 15 minutes, no GPU of" in texts(chat)[0]
    assert "has been busy for more than 10 % of the time" in texts(chat)[0]
