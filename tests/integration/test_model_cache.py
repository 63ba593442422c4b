"""Test that a hub's model is copied to the bucket completely, and that every node copies each model only once."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.s3.models import S3Backend
from pretend_api import wait_until

from raymill import settings
from raymill.ray_support import model_cache

HUB_ID = "owner/name"
FIND = f"from raymill.ray_support import model_cache; print(model_cache.find({HUB_ID!r}))"
WAIT_S = 60


@pytest.fixture
def bucket(s3: str, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of a bucket with the tiny model. The model cache of this node is empty."""
    client = boto3.client("s3")
    for file in (assets / "model").iterdir():
        client.upload_file(str(file), "bucket", f"models/tiny/{file.name}")
    monkeypatch.setenv("PROJECT_DIR", s3)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return s3


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Return the folder of `HUB_ID` in a cache of the hub's library. A node reads its weights in three parts."""
    cache = tmp_path / "hub" / "models--owner--name"
    folder = cache / "snapshots" / "revision"
    for made in (cache / "refs", cache / "blobs", folder / "templates"):
        made.mkdir(parents=True)
    (cache / "refs" / "main").write_text("revision")
    weights = random.Random(0).randbytes(2 * model_cache.PART_BYTES + 1)
    files = {"config.json": b"{}", "empty.txt": b"", "model.safetensors": weights, "templates/rag.jinja": b"template"}
    for name, content in files.items():
        blob = cache / "blobs" / name.replace("/", "-")
        blob.write_bytes(content)
        (folder / name).symlink_to(blob)
    return folder


@pytest.fixture
def project(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of a project without models, which jobs use."""
    monkeypatch.setenv("PROJECT_DIR", f"{s3}/{tmp_path.name}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return f"{s3}/{tmp_path.name}"


def test_a_relative_path_is_found_in_the_bucket(bucket: str) -> None:
    assert model_cache.find("models/tiny") == f"{bucket}/models/tiny"


def test_a_hub_id_that_was_copied_before_is_found_in_the_bucket(bucket: str) -> None:
    boto3.client("s3").put_object(Bucket="bucket", Key=f"models/tiny/{model_cache.MIRRORED}")
    assert model_cache.find("tiny") == f"{bucket}/models/tiny"


def test_a_node_copies_a_model_once(bucket: str, assets: Path) -> None:
    folder = Path(model_cache.on_this_node(f"{bucket}/models/tiny"))
    for file in (assets / "model").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    (folder / "config.json").write_text("kept")
    assert (Path(model_cache.on_this_node(f"{bucket}/models/tiny")) / "config.json").read_text() == "kept"


def test_a_rewritten_model_is_copied_again(bucket: str) -> None:
    model_cache.on_this_node(f"{bucket}/models/tiny")
    boto3.client("s3").put_object(Bucket="bucket", Key="models/tiny/config.json", Body=b"another")
    assert (Path(model_cache.on_this_node(f"{bucket}/models/tiny")) / "config.json").read_text() == "another"


def test_an_incomplete_copy_is_repeated(bucket: str) -> None:
    folder = Path(model_cache.on_this_node(f"{bucket}/models/tiny"))
    (folder / model_cache.COMPLETE).unlink()
    (folder / "config.json").write_text("half")
    assert (Path(model_cache.on_this_node(f"{bucket}/models/tiny")) / "config.json").read_text() != "half"


def test_configuration_and_tokenizer_are_copied_without_weights(bucket: str) -> None:
    folder = Path(model_cache.on_this_node(f"{bucket}/models/tiny", weights=False))
    assert (folder / "tokenizer.json").exists()
    assert not list(folder.glob("*.safetensors"))


def test_locally_a_folder_and_a_hub_id_stay_unchanged(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROJECT_DIR", str(assets))
    assert model_cache.find("model") == f"{assets}/model"
    assert model_cache.find("owner/name") == "owner/name"
    assert model_cache.on_this_node("owner/name") == "owner/name"


@pytest.mark.usefixtures("aws_in_this_process")
def test_a_job_killed_while_it_copies_a_model_to_the_bucket(
    project: str, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with weights_wait(monkeypatch) as uploads, job() as killed:
        wait_until(lambda: len(uploads) == 1 and "config.json" in keys(project), WAIT_S)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert not {"model.safetensors", model_cache.MIRRORED} & keys(project)
    with job() as second:
        assert_mirrored(project, hub, second)


@pytest.mark.usefixtures("aws_in_this_process")
def test_two_jobs_copy_a_model_to_the_bucket_at_once(project: str, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with weights_wait(monkeypatch) as uploads, job() as one, job() as other:
        assert_mirrored(project, hub, one, other)
    assert len(uploads) == 2


def test_a_job_keeps_the_model_that_a_faster_job_has_copied(
    project: str, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, folder = boto3.client("s3"), f"{project.removeprefix('s3://bucket/')}/models/{HUB_ID}"

    def download(*_: object, **__: object) -> str:
        for name in ("config.json", model_cache.MIRRORED):
            client.put_object(Bucket="bucket", Key=f"{folder}/{name}", Body=b"faster")
        return str(hub)

    monkeypatch.setattr(model_cache, "snapshot_download", download)
    model_cache.find(HUB_ID)
    assert client.get_object(Bucket="bucket", Key=f"{folder}/config.json")["Body"].read() == b"faster"


@contextmanager
def job() -> Iterator[subprocess.Popen[str]]:
    """Run a job that needs the hub's model."""
    variables = os.environ | {"HF_HUB_OFFLINE": "1"}  # the hub's library then uses its cache
    command = [sys.executable, "-c", FIND]
    process = subprocess.Popen(command, env=variables, cwd=settings.PROJECT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def weights_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Hold back uploads of weights until two jobs upload them. Yield the ids of their uploads."""
    uploads: set[str] = set()
    release = threading.Event()
    upload_part = S3Backend.upload_part

    def wait(s3: S3Backend, bucket_name: str, upload: str, *part: Any) -> Any:
        if s3.get_bucket(bucket_name).multiparts[upload].key_name.endswith(".safetensors"):
            uploads.add(upload)
            if len(uploads) == 2:
                release.set()
            release.wait(WAIT_S)
        return upload_part(s3, bucket_name, upload, *part)

    with monkeypatch.context() as patch:
        patch.setattr(S3Backend, "upload_part", wait)
        yield uploads
        release.set()


def keys(project: str) -> set[str]:
    """Return the names of the files that the bucket has of the hub's model."""
    prefix = f"{project.removeprefix('s3://bucket/')}/models/{HUB_ID}/"
    found = boto3.client("s3").list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    return {entry["Key"].removeprefix(prefix) for entry in found}


def assert_mirrored(project: str, hub: Path, *jobs: subprocess.Popen[str]) -> None:
    """Check that each job finds a complete copy of the hub's model in the bucket, and that a node gets its files."""
    location = f"{project}/models/{HUB_ID}"
    assert [process.communicate(timeout=WAIT_S)[0].split()[-1] for process in jobs] == [location] * len(jobs)
    names = {str(file.relative_to(hub)) for file in hub.rglob("*") if file.is_file()}
    assert keys(project) == {model_cache.MIRRORED, *names}
    folder = Path(model_cache.on_this_node(location))
    assert all((folder / name).read_bytes() == (hub / name).read_bytes() for name in names)
