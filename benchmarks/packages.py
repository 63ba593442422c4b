"""Compares how fast a node unpacks its packages from the bucket, from an S3 as slow as AWS's, with installing them."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import boto3

from benchmarks import harness, slow_s3
from benchmarks.report import Result, at_most
from raymill import environment
from raymill.common import bucket, cluster_file
from raymill.node import bake, metadata, unpack

ROUNDS = 3
ACCOUNT = "123456789012"  # moto's


def measure() -> Result:
    """Time both ways with this project's packages, which are those of a node without CUDA's."""
    with harness.scratch() as folder, slow_s3.serving() as url:
        _be_a_node(folder, url)
        file = cluster_file.load()
        file.client("s3").create_bucket(Bucket=bucket.name(file))
        os.environ["UV_CACHE_DIR"] = str(folder / "cache")
        _install(folder / "cache")
        bake.main()
        ways: dict[str, Callable[[], float]] = {
            "unpack": lambda: _unpack(file.slug),
            "install": lambda: _install(folder / "cache"),
        }
        ways["unpack"]()  # the first time is not measured, because it also reads the archives from moto
        rounds = harness.alternate(ways, ROUNDS, "s")
    ratio = harness.median_ratio(rounds, "unpack", "install")
    return {
        "bars": [at_most(1, "median ratio of seconds to those of an installation", ratio)],
        "rounds": [{"round": number, **made} for number, made in enumerate(rounds, 1)],
    }


def _be_a_node(folder: Path, url: str) -> None:
    """Replace the home folder and what a node reads from EC2."""
    os.environ |= {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "UV": environment.find_uv(),
        "HOME": str(folder),
    }
    region = boto3.client("s3").meta.region_name
    metadata.identity = lambda: {"accountId": ACCOUNT, "region": region}
    metadata.read = lambda path: (
        '{"AccessKeyId": "test", "SecretAccessKey": "test", "Token": ""}' if "/x" in path else "x"
    )
    unpack.ENVIRONMENT = folder / "env"
    unpack.ON_NVME = folder / "packages/env"
    unpack.COMPLETE = folder / "packages/complete"


def _unpack(project: str) -> float:
    """Unpack the packages, and return the seconds."""
    unpack.clear()
    started = time.perf_counter()
    unpack.main(project, "3.11")
    return time.perf_counter() - started


def _install(cache: Path) -> float:
    """Install the packages with an empty cache, and return the seconds."""
    unpack.clear()
    shutil.rmtree(cache, ignore_errors=True)
    started = time.perf_counter()
    environment.install(unpack.ENVIRONMENT, environment.PINS, "--quiet")
    return time.perf_counter() - started


if __name__ == "__main__":
    harness.main(measure)
