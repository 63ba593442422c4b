"""An emulated AWS in this process, for tests of the verbs, and cluster.yaml with the template's default answers."""

import datetime
import itertools
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import boto3
import moto_state
import pytest
from moto.iam.models import iam_backends
from werkzeug.serving import WSGIRequestHandler, make_server

from raymill import settings
from raymill.aws import capacity_blocks, launcher_file, prepare, teardown
from raymill.common import cluster_file
from raymill.common.cluster_file import ClusterFile
from raymill.emulator import moto_instances
from raymill.emulator.api import Api
from raymill.emulator.consistency import Consistency
from raymill.emulator.moto_instances import ACCOUNT, IMAGE
from raymill.emulator.reservations import Reservations
from raymill.emulator.throttling import Throttle
from raymill.target import WantedBlock

DEFAULTS = {
    r'region: ".*"': 'region: "us-east-1"',
    r"max_workers: \d+": "max_workers: 2",
    r"&gpu_instance_type \S+": "&gpu_instance_type p4d.24xlarge",
    r'Name: "(.*)-[a-z]+-[a-z]+-\d-(head|worker)"': r'Name: "\1-us-east-1-\2"',
}
"""Lines of cluster.yaml for the template's default answers, whatever the answers of this project are."""
FOLDER = tempfile.TemporaryDirectory()
SOURCE = Path(FOLDER.name, "cluster.yaml")
text = cluster_file.FILE.read_text(encoding="utf-8")
for pattern, line in DEFAULTS.items():
    text = re.sub(pattern, line, text)
SOURCE.write_text(text, encoding="utf-8")
FILE = cluster_file.load(SOURCE)
NOW = datetime.datetime.now(datetime.UTC)
ALLOW_ALL = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}'
WANTED = WantedBlock(instances=2, days=1, instance_type="", earliest="", latest="")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Api, str]]:
    """Serve the emulated AWS on loopback."""
    api = Api()
    served = make_server("127.0.0.1", 0, api, threaded=True, request_handler=WSGIRequestHandler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield api, f"http://127.0.0.1:{served.server_port}"
    served.shutdown()


@pytest.fixture
def aws(server: tuple[Api, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Api]:
    """Yield an emulated AWS with an empty account, which boto3 uses."""
    api, url = server
    _empty_account()
    api.calls.clear()
    api.reservations, api.throttle = Reservations(), Throttle()
    api.consistency = Consistency(itertools.count(step=1000.0).__next__)  # so that every effect is visible at once
    moto_instances.publish_image(FILE.region, IMAGE)
    users = iam_backends[ACCOUNT]["aws"]
    users.create_user(FILE.region, "laptop")
    users.put_user_policy("laptop", "all", ALLOW_ALL)
    key = users.create_access_key("laptop")
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": key.access_key_id,
        "AWS_SECRET_ACCESS_KEY": key.secret_access_key,
        "HOME": str(tmp_path),  # for the private key
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setattr(launcher_file, "FILE", tmp_path / "cluster.yaml")
    monkeypatch.setattr(capacity_blocks, "OFFERINGS", tmp_path / "offerings.json")
    monkeypatch.setattr(prepare, "_own_address", lambda: "203.0.113.7")
    monkeypatch.setattr(teardown, "SETTLE_TIMEOUT_S", 0.0)
    yield api
    _empty_account()


def _empty_account() -> None:
    """Empty these services. S3 keeps the bucket of other tests, which the `reset` of any service would delete."""
    moto_state.empty(("ec2", "iam", "cloudformation", "lambda", "scheduler"))


@pytest.fixture(autouse=True)
def assign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Let the test use a copy of settings.toml. Return a function that sets a key in a section of it."""
    copy = Path(shutil.copy(settings.FILE, tmp_path))
    monkeypatch.setattr(settings, "FILE", copy)
    monkeypatch.setattr(cluster_file.load, "__defaults__", (SOURCE,))
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": copy})

    def assign(section: str, assignment: str) -> None:
        key = assignment.partition(" = ")[0]
        text = copy.read_text(encoding="utf-8")
        before, header, rest = text.partition(f"[{section}]")
        changed, count = re.subn(rf"^{key} = .*", assignment, rest, count=1, flags=re.MULTILINE)
        assert count == 1
        copy.write_text(f"{before}{header}{changed}", encoding="utf-8")

    return assign


def launch_head(file: ClusterFile) -> str:
    """Launch the head as Ray's launcher does, and return its id."""
    template = file.head.node_config["LaunchTemplate"]
    versions = file.client("ec2").describe_launch_template_versions(
        LaunchTemplateName=template["LaunchTemplateName"], Versions=[template["Version"]]
    )["LaunchTemplateVersions"]
    config = file.head.node_config | versions[0]["LaunchTemplateData"]
    tags = [{"Key": "ray-project", "Value": file.slug}, {"Key": "ray-user-node-type", "Value": file.head.name}]
    config["TagSpecifications"] = [{"ResourceType": "instance", "Tags": tags}]
    (instance,) = file.client("ec2").run_instances(**config, MinCount=1, MaxCount=1)["Instances"]
    return instance["InstanceId"]


def in_region(region: str) -> ClusterFile:
    """Return cluster.yaml as a user changes it for another region."""
    return edited({f'region: "{FILE.region}"': f'region: "{region}"', f"-{FILE.region}-": f"-{region}-"})


def edited(changes: Mapping[str, str]) -> ClusterFile:
    """Return cluster.yaml with these texts replaced."""
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    changed = SOURCE.with_name("changed.yaml")
    changed.write_text(text, encoding="utf-8")
    return cluster_file.load(changed)
