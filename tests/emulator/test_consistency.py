"""Test the emulator's eventual consistency, and that secrets survive it."""

import json
import threading
from collections.abc import Iterator

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.iam.models import iam_backends
from werkzeug.serving import make_server

from raymill import output_lease
from raymill.aws import secrets_manager
from raymill.common import cluster_file
from raymill.common.cluster_file import ClusterFile
from raymill.emulator import api, consistency, iam
from raymill.errors import UserError
from raymill.output_lease import Holder
from raymill.serving.keys import OWNER_SECRET


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterFile]:
    """Serve the emulated AWS to an administrator, and yield the cluster file."""
    backend = iam_backends["123456789012"]["aws"]
    backend.create_user("us-east-1", "laptop")
    statement = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    backend.put_user_policy("laptop", "all", json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
    key = backend.create_access_key("laptop")
    server = make_server("127.0.0.1", 0, api.Api(), threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key.secret_access_key)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    yield cluster_file.load()
    server.shutdown()
    thread.join()
    backend.delete_user_policy("laptop", "all")
    backend.delete_access_key(key.access_key_id, "laptop")
    backend.delete_user("laptop")


def test_secrets_that_the_list_lacks_are_found_and_deleted(
    file: ClusterFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` lists the secrets before it stores the first one, and `down` may run within the lag."""
    monkeypatch.setattr(consistency, "NAME_LAG_S", 0.5)
    monkeypatch.setattr(secrets_manager, "RETRY_S", 0.1)
    assert secrets_manager.names(file) == []
    secrets_manager.upload(file)
    assert secrets_manager.names(file) == [OWNER_SECRET]
    secrets_manager.delete(file)
    assert secrets_manager.names(file) == []
    secrets_manager.upload(file)  # at once: AWS still deletes the old secret
    assert secrets_manager.names(file) == [OWNER_SECRET]
    secrets_manager.delete(file)


def test_a_lease_survives_conflicts(file: ClusterFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lease, "RETRY_INTERVAL_S", 0.01)
    client = file.client("s3")
    client.create_bucket(Bucket="leases")
    with pytest.raises(ClientError, match=r"\(ConditionalRequestConflict\).*conflicting operation"):
        client.put_object(Bucket="leases", Key="first", Body=b"", IfNoneMatch="*")
    store, path = output_lease._find("s3://leases/results", "--output")
    jobs = [Holder(cluster="this", job=name, name=name, token=name) for name in ("first", "second")]
    lease = output_lease._acquire(store, path, jobs[0], lambda holder: False, "--output")
    for _ in range(4):
        lease.confirm()
        with pytest.raises(UserError, match="first is writing to s3://leases/results; wait until it ends"):
            output_lease._acquire(store, path, jobs[1], lambda holder: False, "--output")
    lease.release()


def test_a_list_is_stale_for_minutes(clock: Clock) -> None:
    seen = consistency.Consistency(clock)
    seen.keep_list({"Filters": []}, b"old")
    clock.now += consistency.LIST_LAG_S - 1
    assert seen.stale_list("ListSecrets", {"Filters": []}) == b"old"
    assert seen.stale_list("DescribeSecret", {"Filters": []}) is None
    clock.now += 1
    assert seen.stale_list("ListSecrets", {"Filters": []}) is None


def test_a_new_instance_is_unknown_for_seconds(clock: Clock) -> None:
    seen = consistency.Consistency(clock)
    seen.note_launch(["i-1"])
    with pytest.raises(iam.AwsError, match="The instance ID 'i-1' does not exist"):
        seen.check("TerminateInstances", {"InstanceId.1": "i-1"})
    seen.check("CreateTags", {"ResourceId.1": "i-1"})
    clock.now += consistency.INSTANCE_LAG_S
    seen.check("TerminateInstances", {"InstanceId.1": "i-1"})
