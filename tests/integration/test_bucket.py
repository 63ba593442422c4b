"""Test the rules of the project's bucket."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from raymill import settings
from raymill.aws import ssh
from raymill.common import bucket, cluster_file, instances, remaining_costs
from raymill.common.cluster_file import ClusterFile

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


SECRETS = "the secrets (0.40 dollars each per month)"


@pytest.mark.parametrize(
    ("changes", "costs"),
    [
        ({}, SECRETS),
        ({"private": "true"}, f"the NAT gateway (about 0.05 dollars per hour) and {SECRETS}"),
        # the user's own gateway
        ({"private": "true", "subnets": '["subnet-1"]', "head_subnet": '"subnet-2"'}, SECRETS),
        (
            {"private": "true", "certificate": '"arn:aws:acm:1"', "clients": '"203.0.113.0/24"'},
            "the load balancer (about 20 dollars per month), the NAT gateway (about 0.05 dollars per hour) and "
            + SECRETS,
        ),
    ],
)
def test_what_still_costs_money_is_named(
    changes: dict[str, str], costs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = settings.FILE.read_text(encoding="utf-8")
    for key, value in changes.items():
        text, count = re.subn(rf"^{key} = \S+", f"{key} = {value}", text, flags=re.MULTILINE)
        assert count == 1
    copy = tmp_path / "settings.toml"
    copy.write_text(text, encoding="utf-8")
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": copy})
    assert remaining_costs.describe().startswith(f"You still pay for {costs} until you run: inv down --target aws ")


def test_without_a_cluster_the_note_says_why_and_what_still_costs_money(
    file: ClusterFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "head", lambda file: None)
    bucket.leave_note(file, "the limit of 5 dollars in settings.toml is reached")
    with pytest.raises(
        ssh.NotOnCluster, match=r"the limit of 5 dollars .* is reached\. You still pay for .*: inv down --"
    ):
        ssh.find_head(file)
    bucket.forget_note(file)
    with pytest.raises(ssh.NotOnCluster, match=r"runs in \S+\. Run: inv up --target aws"):
        ssh.find_head(file)
