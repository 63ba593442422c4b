"""Test the rules of the project's bucket."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from cluster.common import bucket, cluster_file
from cluster.common.cluster_file import ClusterFile

KILLED_UPLOAD = """
import os, signal, sys
import pyarrow.fs as pa_fs
files, path = pa_fs.FileSystem.from_uri(sys.argv[1])
stream = files.open_output_stream(path)
stream.write(b"x" * 20_000_000)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def file(s3: str) -> Iterator[ClusterFile]:
    file = cluster_file.load()
    resource = boto3.resource("s3").Bucket(bucket.name(file))
    if not bucket.exists(file):  # another test may have made it
        resource.create()
    yield file
    for upload in resource.multipart_uploads.all():
        upload.abort()
    resource.LifecycleConfiguration().delete()


def rules(file: ClusterFile) -> list[dict[str, Any]]:
    return file.client("s3").get_bucket_lifecycle_configuration(Bucket=bucket.name(file))["Rules"]


def test_the_parts_of_a_killed_upload_are_deleted(file: ClusterFile) -> None:
    target = f"s3://{bucket.name(file)}/runs/model.safetensors"
    killed = subprocess.run([sys.executable, "-c", KILLED_UPLOAD, target])
    assert killed.returncode < 0
    (left,) = file.client("s3").list_multipart_uploads(Bucket=bucket.name(file))["Uploads"]
    bucket.add_lifecycle_rules(file)
    (rule,) = [rule for rule in rules(file) if "AbortIncompleteMultipartUpload" in rule]
    assert left["Key"].startswith(rule["Filter"]["Prefix"])
    assert rule["Status"] == "Enabled"
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 2}


def test_the_users_rules_stay(file: ClusterFile) -> None:
    own = {"ID": "mine", "Status": "Enabled", "Filter": {"Prefix": "data/"}, "Expiration": {"Days": 30}}
    file.client("s3").put_bucket_lifecycle_configuration(
        Bucket=bucket.name(file), LifecycleConfiguration={"Rules": [own]}
    )
    for _ in range(2):
        bucket.add_lifecycle_rules(file)
    assert [rule["ID"] for rule in rules(file)] == ["mine", "unfinished-uploads", "old-logs"]
