"""Test that Ray's launches stay within EC2's limits on request rates, with the settings of cluster.yaml.

Ray's own AWS provider launches. Time runs SPEED times as fast.
"""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from unittest import mock
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import boto3
import pytest
from botocore.retries import bucket
from ray.autoscaler._private import constants
from ray.autoscaler._private.aws import node_provider, utils

from raymill import settings
from raymill.emulator import iam, throttling

SPEED = 8
INSTANCES = 64
LATENCY_S = 1.5
"""How long EC2 takes to accept a launch."""
LAUNCHED = b"<item><instanceId>i-1</instanceId><instanceState><code>0</code><name>pending</name></instanceState></item>"
ANSWER = b"<RunInstancesResponse><instancesSet>" + LAUNCHED + b"</instancesSet></RunInstancesResponse>"
ERROR = b"<Response><Errors><Error><Code>%s</Code><Message>no</Message></Error></Errors></Response>"
LAUNCH = {"ImageId": "ami-1", "SubnetIds": ["subnet-1"], "NetworkInterfaces": [{"SubnetId": "subnet-1"}]}


def head_variables() -> dict[str, str]:
    """Return the variables that cluster.yaml sets for Ray's launches on the head."""
    text = (settings.PROJECT / "cluster" / "cluster.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"\b(AUTOSCALER_MAX_\w+|AWS_RETRY_MODE|BOTO_\w+)=(\S+)", text))


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = INSTANCES


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class Ec2:
    """Answers RunInstances with EC2's limits."""

    def __init__(self) -> None:
        self.throttle = throttling.Throttle(lambda: time.monotonic() * SPEED)
        self.has_capacity = True
        self.calls = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.calls += 1
        try:
            self.throttle.check("ec2", "RunInstances")
        except iam.AwsError as error:
            status, body = "503 Service Unavailable", ERROR % error.code.encode()
        else:
            time.sleep(LATENCY_S / SPEED)
            no_capacity = "400 Bad Request", ERROR % b"InsufficientInstanceCapacity"
            status, body = ("200 OK", ANSWER) if self.has_capacity else no_capacity
        start_response(status, [("Content-Type", "text/xml")])
        return [body]


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ec2]:
    """Serve RunInstances, to Ray's AWS provider too."""
    ec2 = Ec2()
    server = make_server("127.0.0.1", 0, ec2, server_class=Server, handler_class=Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    keys = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    for name, value in keys.items() | {("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")}:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    token_bucket: Any = bucket.TokenBucket  # its method is private
    wait = token_bucket._sleep_amount
    monkeypatch.setattr(bucket.Clock, "current_time", lambda self: time.time() * SPEED)
    monkeypatch.setattr(token_bucket, "_sleep_amount", lambda self, amount: wait(self, amount) / SPEED)
    yield ec2
    server.shutdown()
    thread.join()
    server.server_close()


class Autoscaler:
    """Launches as Ray's autoscaler does: in each loop, at most as many as may be pending, each in a call of its own."""

    def __init__(self, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        if mode := variables.get("AWS_RETRY_MODE"):
            monkeypatch.setenv("AWS_RETRY_MODE", mode)
        tries = int(variables.get("BOTO_CREATE_MAX_RETRIES", constants.BOTO_CREATE_MAX_RETRIES))
        monkeypatch.setattr(node_provider, "BOTO_CREATE_MAX_RETRIES", tries)
        output = mock.MagicMock()  # Ray's output would fill the screen
        output.abort.side_effect = lambda *_, exc: (_ for _ in ()).throw(exc)
        monkeypatch.setattr(node_provider, "cli_logger", output)
        utils.resource_cache.cache_clear()
        self._provider = node_provider.AWSNodeProvider({"region": "us-east-1", "cache_stopped_nodes": False}, "it")
        default = constants.AUTOSCALER_MAX_CONCURRENT_LAUNCHES
        self._limit = int(variables.get("AUTOSCALER_MAX_CONCURRENT_LAUNCHES", default))
        self._pool = ThreadPoolExecutor(self._limit)

    def launch(self, queued: int) -> "Result":
        """Launch instances. A failed launch is requested again in a later loop."""
        started, failed = time.monotonic(), 0
        pending: list[Future[None]] = []
        while queued or pending:
            starting = min(queued, self._limit - len(pending))
            pending += [self._pool.submit(self._provider._create_node, LAUNCH, {}, 1) for _ in range(starting)]
            time.sleep(constants.AUTOSCALER_UPDATE_INTERVAL_S / SPEED)
            again = [one for one in pending if one.done() and one.exception()]
            queued += len(again) - starting
            failed += len(again)
            pending = [one for one in pending if not one.done()]
        return Result((time.monotonic() - started) * SPEED, failed)

    def first_refusal_s(self) -> float:
        """Return how many seconds pass until Ray reports the first refused launch."""
        started = time.monotonic()
        with contextlib.suppress(Exception):
            self._provider._create_node(LAUNCH, {}, 1)
        return (time.monotonic() - started) * SPEED


class Result(NamedTuple):
    """What became of the launches."""

    seconds: float
    failed: int
    """Launches that Ray gave up. A gang takes each of them for a refusal, and leaves the zone."""


@pytest.mark.nightly  # and the next two: time runs SPEED times as fast, so another busy process counts as much
def test_64_instances_start_in_less_than_a_minute(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    """EC2's bucket alone takes 30 s. botocore's adaptive mode guesses the allowed rate, so a launch may rarely fail."""
    result = Autoscaler(head_variables(), monkeypatch).launch(INSTANCES)
    assert result.seconds < 55, result
    assert result.failed <= 1, result


@pytest.mark.nightly
@pytest.mark.parametrize("other", [{"AWS_RETRY_MODE": ""}, {"BOTO_CREATE_MAX_RETRIES": "1"}])
def test_with_other_settings_launches_fail(ec2: Ec2, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]) -> None:
    result = Autoscaler(head_variables() | other, monkeypatch).launch(INSTANCES // 2)
    assert result.failed > 1, result


@pytest.mark.nightly
def test_a_refusal_is_known_within_seconds(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray repeats a refused launch, although each node type has only one subnet."""
    ec2.has_capacity = False
    assert Autoscaler(head_variables(), monkeypatch).first_refusal_s() < 6
    assert ec2.calls == int(head_variables()["BOTO_CREATE_MAX_RETRIES"])


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
