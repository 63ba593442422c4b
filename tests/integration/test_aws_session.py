"""Test that a profile with MFA is asked for one code, however many verbs, sessions and processes use it."""

import datetime
import getpass
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.iam.models import iam_backends
from werkzeug.serving import WSGIRequestHandler, make_server

from raymill import settings
from raymill.aws import aws_errors
from raymill.aws.doctor import checks
from raymill.common import aws_session, bucket, cluster_file
from raymill.common.cluster_file import ClusterFile
from raymill.emulator.api import Api
from raymill.emulator.moto_instances import ACCOUNT
from raymill.errors import UserError

FILE = cluster_file.load()
ALLOW_ALL = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}'
CONFIG = f"""
[profile with-mfa]
role_arn = arn:aws:iam::{ACCOUNT}:role/admin
source_profile = base
mfa_serial = arn:aws:iam::{ACCOUNT}:mfa/phone
[profile process]
credential_process = {{process}}
"""


CALLS: dict[str, Callable[[str], object]] = {
    "sts": lambda region: aws_session.client("sts", region).get_caller_identity(),
    "ec2": lambda region: aws_session.client("ec2", region).describe_instances(),
    "s3": lambda region: aws_session.client("s3", region).list_buckets(),
    "secretsmanager": lambda region: aws_session.client("secretsmanager", region).list_secrets(),
}


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """Yield an emulated AWS, and a home whose profile `with-mfa` assumes a role there."""
    api = Api()

    class Handler(WSGIRequestHandler):
        def date_time_string(self, timestamp: float | None = None) -> str:
            """Return the time of AWS's clock, for each answer."""
            return super().date_time_string(time.time() + api.faults.clock_s)

    served = make_server("127.0.0.1", 0, api, threaded=True, request_handler=Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    backend = iam_backends[ACCOUNT]["aws"]
    backend.create_user("us-east-1", "laptop")
    backend.put_user_policy("laptop", "all", ALLOW_ALL)
    key = backend.create_access_key("laptop")
    backend.create_role("admin", "{}", "/", None, "", [], "3600")
    backend.put_role_policy("admin", "all", ALLOW_ALL)
    folder = tmp_path / ".aws"
    folder.mkdir()
    process = {"Version": 1, "AccessKeyId": key.access_key_id, "SecretAccessKey": key.secret_access_key}
    (tmp_path / "process.json").write_text(json.dumps(process))
    (folder / "config").write_text(CONFIG.replace("{process}", f"cat {tmp_path}/process.json"))
    (folder / "credentials").write_text(
        f"[base]\naws_access_key_id = {key.access_key_id}\naws_secret_access_key = {key.secret_access_key}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "with-mfa")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{served.server_port}")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    yield api
    served.shutdown()
    backend.reset()


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answer each question with a new code, and list the questions."""
    asked: list[str] = []
    codes = (f"{number:06}" for number in itertools.count(1))
    monkeypatch.setattr(getpass, "getpass", lambda question: (asked.append(question), next(codes))[1])
    return asked


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)


def test_doctor_up_and_status_ask_for_one_code(
    aws: Api, questions: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert checks._sign_in(FILE).arn.startswith(f"arn:aws:sts::{ACCOUNT}:assumed-role/admin/")  # inv doctor
    aws_session.start(FILE.region)
    FILE.client("ec2").describe_instances()
    new_process(monkeypatch)  # inv up
    assert bucket.access(FILE)["AWS_SESSION_TOKEN"]
    FILE.client("ec2").describe_instances()
    calls = len(aws.calls)
    # like `ray up`, this asks EC2 for the head; there is no terminal for questions
    ray_up = [sys.executable, "-m", "raymill.aws.ray_up", "get-head-ip", str(cluster_file.FILE)]
    done = subprocess.run(ray_up, cwd=settings.PROJECT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "not found" in done.stdout + done.stderr
    assert {call.caller.partition("/")[0] for call in aws.calls[calls:]} == {f"arn:aws:sts::{ACCOUNT}:assumed-role"}
    new_process(monkeypatch)  # inv status
    FILE.client("cloudformation").describe_stacks()
    assert len(questions) == 1
    assert "mfa/phone" in questions[0]
    (cached,) = (tmp_path / ".aws/cli/cache").iterdir()
    assert cached.stat().st_mode & 0o777 == 0o600


def test_after_the_hour_it_asks_again(
    aws: Api, questions: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FILE.client("sts").get_caller_identity()
    (cached,) = (tmp_path / ".aws/cli/cache").iterdir()
    answer = json.loads(cached.read_text())
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=14)
    answer["Credentials"]["Expiration"] = soon.isoformat()
    for text in (json.dumps(answer), "{damaged"):
        cached.write_text(text)
        new_process(monkeypatch)
        FILE.client("sts").get_caller_identity()
    assert len(questions) == 3


def test_without_a_writable_home_it_asks_again(
    aws: Api, questions: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".aws/cli").write_text("")  # no folder can be made here, even by root
    for _ in range(2):
        new_process(monkeypatch)
        FILE.client("sts").get_caller_identity()
    assert len(questions) == 2


@pytest.mark.parametrize("profile", ["base", "process"])
def test_other_profiles_are_not_cached(
    aws: Api, questions: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: str
) -> None:
    monkeypatch.setenv("AWS_PROFILE", profile)
    assert FILE.client("sts").get_caller_identity()["Arn"].endswith("user/laptop")
    assert not questions
    assert not (tmp_path / ".aws/cli").exists()


@pytest.mark.parametrize(
    ("service", "aws_ahead_s", "words"),
    [
        ("sts", 3900, "65 minutes behind AWS's"),
        ("ec2", 3900, "65 minutes behind AWS's"),
        ("s3", -3900, "65 minutes ahead of AWS's"),
        ("secretsmanager", -7600, "2 hours ahead of AWS's"),
        ("sts", 9e6, "104 days behind AWS's"),
    ],
)
def test_a_wrong_clock_is_not_blamed_on_credentials(
    aws: Api, monkeypatch: pytest.MonkeyPatch, service: str, aws_ahead_s: float, words: str
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "base")
    aws.faults.clock_s = aws_ahead_s
    sentence = aws_errors.explain(error_of(service))
    assert sentence.startswith(f"this machine's clock is {words}, which rejects that. Run: sudo ")
    (found,) = [one.text for one in checks.check(FILE) if "clock" in one.text]
    assert f"this machine's clock is {words}" in found
    aws.faults.clock_s = aws_ahead_s / abs(aws_ahead_s) * 200  # AWS tolerates this
    assert FILE.client("sts").get_caller_identity()


@pytest.mark.parametrize(
    ("service", "profile"),
    [("sts", "base"), ("ec2", "base"), ("s3", "base"), ("secretsmanager", "base"), ("ec2", "with-mfa")],
)
@pytest.mark.usefixtures("questions")
def test_a_region_that_is_not_enabled_is_not_blamed_on_credentials(
    aws: Api, monkeypatch: pytest.MonkeyPatch, service: str, profile: str
) -> None:
    monkeypatch.setenv("AWS_PROFILE", profile)
    region = "me-south-1"
    monkeypatch.setattr(cluster_file, "load", lambda: SimpleNamespace(region=region))
    aws.faults.disabled_regions = [region]
    with pytest.raises(ClientError) as error:
        CALLS[service](region)
    sentence = aws_errors.explain(error.value)
    assert f"accepts your credentials in us-east-1, but not in {region}" in sentence
    assert sentence.endswith(f"aws account enable-region --region-name {region}")
    with pytest.raises(UserError, match="accepts your credentials in us-east-1, but not in"):
        checks._sign_in(ClusterFile(FILE.content | {"provider": {"region": region}}, ""))


def test_wrong_credentials_are_still_blamed(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setattr(cluster_file, "load", lambda: SimpleNamespace(region="me-south-1"))
    for service in ("sts", "secretsmanager"):
        assert "aws configure" in aws_errors.explain(error_of(service))


def test_the_words_of_an_organization_are_kept(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "base")
    aws.faults.organization_denies = ["ec2:Describe*"]
    sentence = aws_errors.explain(error_of("ec2"))
    denial = "a policy denies you the permission ec2:Describe"
    assert sentence.startswith(denial)
    assert "with an explicit deny in a service control policy: arn:aws:organizations::" in sentence
    assert "Only the administrators of your AWS organization" in sentence
    denied = [one.text for one in checks.check(FILE) if "service control policy" in one.text]
    assert any(text.startswith(f"zones: not checked. {denial}") for text in denied)


def error_of(service: str) -> ClientError:
    with pytest.raises(ClientError) as error:
        CALLS[service](FILE.region)
    return error.value


def test_a_used_code_and_a_missing_terminal_are_explained(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    aws.used_codes.add("000001")
    monkeypatch.setattr(getpass, "getpass", lambda question: "000001")
    with pytest.raises(ClientError) as wrong:
        FILE.client("sts").get_caller_identity()
    assert aws_errors.explain(wrong.value).startswith("AWS rejects the MFA code. Each code works once")
    code = "from raymill.common import cluster_file; cluster_file.load().client('sts').get_caller_identity()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=settings.PROJECT,
        env=os.environ,
        start_new_session=True,  # without a terminal
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert "UserError: your AWS profile needs a code for MFA, but there is no terminal" in done.stderr


def test_callers_share_a_client_until_another_session_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    first = aws_session.client("sts", "us-east-1")
    assert aws_session.client("sts", "us-east-1") is first
    assert aws_session.client("sts", "eu-west-1") is not first
    aws_session.start("us-east-1")
    assert aws_session.client("sts", "us-east-1") is not first
