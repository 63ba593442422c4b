"""Test that Ray's launches stay within EC2's limits on request rates, with the settings of cluster.yaml."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from wsgiref.simple_server import WSGIRequestHandler, make_server

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from ray.autoscaler._private.constants import BOTO_CREATE_MAX_RETRIES

import settings
from cluster.emulator import iam, throttling

INSTANCES = 24
ANSWER = b"<RunInstancesResponse><instancesSet/></RunInstancesResponse>"
ERROR = b"<Response><Errors><Error><Code>RequestLimitExceeded</Code><Message>no</Message></Error></Errors></Response>"


def head_variables() -> dict[str, str]:
    """Return the variables that cluster.yaml sets for Ray on the head."""
    text = (settings.PROJECT / "cluster" / "cluster.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"\b(AUTOSCALER_MAX_\w+|AWS_RETRY_MODE)=(\S+)", text))


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Serve RunInstances with EC2's limits."""
    throttle = throttling.Throttle()

    def application(environ: dict, start_response: object) -> list[bytes]:
        try:
            throttle.check("ec2", "RunInstances")
            status, body = "200 OK", ANSWER
        except iam.AwsError:
            status, body = "503 Service Unavailable", ERROR
        start_response(status, [("Content-Type", "text/xml")])  # type: ignore[operator]
        return [body]

    server = make_server("127.0.0.1", 0, application, handler_class=Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def launch_all(endpoint: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Launch instances as Ray's AWS provider does, and return how many launches fail."""
    if mode := variables.get("AWS_RETRY_MODE"):
        monkeypatch.setenv("AWS_RETRY_MODE", mode)
    session = boto3.session.Session("none", "none", region_name="us-east-1")
    client = session.client("ec2", endpoint_url=endpoint, config=Config(retries={"max_attempts": 0}))

    def launch(_: int) -> bool:
        for _ in range(BOTO_CREATE_MAX_RETRIES):
            try:
                client.run_instances(ImageId="ami-1", MinCount=1, MaxCount=1)
            except ClientError:
                continue
            return True
        return False

    with ThreadPoolExecutor(int(variables.get("AUTOSCALER_MAX_CONCURRENT_LAUNCHES", 10))) as pool:
        return list(pool.map(launch, range(INSTANCES))).count(False)


def test_hardly_any_launch_fails_because_of_its_rate(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore's adaptive mode guesses the allowed rate, so a launch can fail in rare cases. Ray then tries again."""
    assert launch_all(endpoint, head_variables(), monkeypatch) <= INSTANCES / 12


def test_with_rays_defaults_launches_fail(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_all(endpoint, {}, monkeypatch) > INSTANCES / 2


def test_a_bucket_refills() -> None:
    now = [0.0]
    throttle = throttling.Throttle(lambda: now[0])
    for _ in range(5):
        throttle.check("ec2", "RunInstances")
    with pytest.raises(iam.AwsError, match="Request limit exceeded"):
        throttle.check("ec2", "RunInstances")
    throttle.check("ec2", "DescribeInstances")
    throttle.check("s3", "GET /bucket")
    now[0] = 0.5
    throttle.check("ec2", "RunInstances")
