"""Compares how fast a node copies a model from the bucket with Arrow's `copy_files`, from an S3 as slow as AWS's."""

import filecmp
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import boto3
import pyarrow.fs

from benchmarks import harness, slow_s3
from benchmarks.report import Result, at_least
from raymill.ray_support import model_cache

MIB = 2**20
SIZE_MIB, ROUNDS = 256, 3
MODEL = "s3://bucket/models/made"
WEIGHTS = "model.safetensors"


def measure() -> Result:
    """Time each way to copy a folder with one file of weights."""
    with harness.scratch() as folder, slow_s3.serving() as url:
        os.environ |= {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "HF_HOME": str(folder / "copies"),
        }
        (folder / WEIGHTS).write_bytes(os.urandom(SIZE_MIB * MIB))
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        client.upload_file(str(folder / WEIGHTS), "bucket", f"models/made/{WEIGHTS}")
        ways = {
            "this project": lambda: _speed(folder, lambda: model_cache.on_this_node(MODEL)),
            "copy_files, 64 MiB": lambda: _speed(folder, lambda: _copy_files(folder / "copies", 64 * MIB)),
            "copy_files": lambda: _speed(folder, lambda: _copy_files(folder / "copies", MIB)),
        }
        ways["this project"]()  # the first copy is not measured, because it also reads the weights from moto
        rounds = harness.alternate(ways, ROUNDS, "MiB/s")
    ratio = harness.median_ratio(rounds, "this project", "copy_files")
    return {
        "bars": [at_least(10, "median ratio of MiB/s to copy_files", ratio)],
        "rounds": [{"round": number, **made} for number, made in enumerate(rounds, 1)],
    }


def _copy_files(folder: Path, chunk_bytes: int) -> str:
    folder.mkdir()
    pyarrow.fs.copy_files(MODEL, str(folder), chunk_size=chunk_bytes)
    return str(folder)


def _speed(folder: Path, copy: Callable[[], str]) -> float:
    """Return MiB/s, and delete the copy after comparing it."""
    started = time.perf_counter()
    made = copy()
    seconds = time.perf_counter() - started
    assert filecmp.cmp(folder / WEIGHTS, Path(made, WEIGHTS), shallow=False)
    shutil.rmtree(folder / "copies")
    return SIZE_MIB / seconds


if __name__ == "__main__":
    harness.main(measure)
