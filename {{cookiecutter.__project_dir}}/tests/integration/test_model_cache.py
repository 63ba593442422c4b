"""Test that every node finds models in a bucket, and copies each model only once."""

from pathlib import Path

import boto3
import pytest

from pipeline.ray_support import model_cache


@pytest.fixture
def bucket(s3: str, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of a bucket with the tiny model. The model cache of this node is empty."""
    client = boto3.client("s3")
    for file in (assets / "model").iterdir():
        client.upload_file(str(file), "bucket", f"models/tiny/{file.name}")
    monkeypatch.setenv("PROJECT_DIR", s3)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return s3


def test_a_relative_path_is_found_in_the_bucket(bucket: str) -> None:
    assert model_cache.find("models/tiny") == f"{bucket}/models/tiny"


def test_a_hub_id_that_was_copied_before_is_found_in_the_bucket(bucket: str) -> None:
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
