"""Fixture: an account of the emulated AWS, in this process."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from emulator.emulated_account import EmulatedAccount, serve
from raymill import settings
from raymill.aws import launcher_file, prepare
from raymill.common import cluster_file

# a shell may start these tests with both signals ignored, and child processes would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[EmulatedAccount]:
    """Yield an empty account of the emulated AWS, with which this process works."""
    copy = Path(shutil.copy(settings.FILE, tmp_path))
    monkeypatch.setattr(settings, "FILE", copy)
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": copy})
    monkeypatch.setattr(launcher_file, "FILE", tmp_path / "cluster.yaml")
    monkeypatch.setattr(prepare, "_own_address", lambda: "203.0.113.7")
    monkeypatch.setenv("HOME", str(tmp_path))  # for the private key
    with serve(cluster_file.load(), copy, monkeypatch) as account:
        yield account


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the S3 server of other tests in this process. Tests here use moto in this process, or set the endpoint."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # its clients may have that endpoint
