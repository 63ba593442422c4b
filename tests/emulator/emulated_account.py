"""An account of the emulated AWS, served in this process, for tests of `prepare` and `down`."""

import itertools
import json
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import moto_state
import pytest
from moto.cloudformation.models import Stack, cloudformation_backends
from moto.iam.models import iam_backends
from werkzeug.serving import WSGIRequestHandler, make_server

from raymill.aws import launcher_file
from raymill.common import cluster_file
from raymill.common.cluster_file import ClusterFile
from raymill.emulator import moto_instances, stack_resources
from raymill.emulator.api import Api
from raymill.emulator.consistency import Consistency
from raymill.emulator.moto_instances import ACCOUNT

SERVICES = ("acm", "budgets", "cloudformation", "ec2", "elbv2", "iam", "lambda", "s3", "scheduler", "secretsmanager")


class QuietHandler(WSGIRequestHandler):
    """Logs no requests."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class EmulatedAccount:
    """The account of the user `laptop`, and a copy of settings.toml."""

    def __init__(self, api: Api, file: ClusterFile, settings_file: Path) -> None:
        self.api, self.file, self._settings = api, file, settings_file

    @property
    def stack(self) -> Stack:
        """The only stack, as moto has it."""
        (found,) = cloudformation_backends[ACCOUNT][self.file.region].stacks.values()
        return found

    def assign(self, section: str, *assignments: str) -> None:
        """Set keys in a section of settings.toml, as `key = value`."""
        for assignment in assignments:
            key = assignment.partition(" = ")[0]
            before, header, rest = self._settings.read_text(encoding="utf-8").partition(f"\n[{section}]")
            changed, count = re.subn(rf"^{key} = .*", assignment, rest, count=1, flags=re.MULTILINE)
            assert count == 1, assignment
            self._settings.write_text(f"{before}{header}{changed}", encoding="utf-8")

    def allow(self, actions: Iterable[str], **condition: dict[str, str]) -> None:
        """Let the user do only this."""
        statement = {"Effect": "Allow", "Action": sorted(actions), "Resource": "*"}
        statement |= {"Condition": condition} if condition else {}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam_backends[ACCOUNT]["aws"].put_user_policy("laptop", "all", policy)

    def deny(self, *actions: str) -> None:
        """Let the user do everything but these actions."""
        statements = [{"Effect": "Allow", "Action": "*", "Resource": "*"}]
        statements += [{"Effect": "Deny", "Action": action, "Resource": "*"} for action in actions]
        policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
        iam_backends[ACCOUNT]["aws"].put_user_policy("laptop", "all", policy)

    def instances(self) -> list[Any]:
        """Return the instances as moto has them."""
        return [one.moto for one in moto_instances.list_all()]

    def launch(self, node_type: str) -> str:
        """Launch an instance of a node type as Ray's launcher and autoscaler do, and return its id."""
        file = cluster_file.load(launcher_file.FILE)
        (one,) = [one for one in (file.head, *file.workers) if one.name == node_type]
        ec2, config = file.client("ec2"), dict(one.node_config)
        template = config["LaunchTemplate"]
        versions = ec2.describe_launch_template_versions(
            LaunchTemplateName=template["LaunchTemplateName"], Versions=[template["Version"]]
        )["LaunchTemplateVersions"]
        config |= versions[0]["LaunchTemplateData"]
        tags = [{"Key": "ray-project", "Value": file.slug}, {"Key": "ray-user-node-type", "Value": node_type}]
        config["TagSpecifications"] = [{"ResourceType": "instance", "Tags": tags}]
        (instance,) = ec2.run_instances(**config, MinCount=1, MaxCount=1)["Instances"]
        return instance["InstanceId"]


@contextmanager
def serve(file: ClusterFile, settings_file: Path, patch: pytest.MonkeyPatch) -> Iterator[EmulatedAccount]:
    """Serve an empty account on loopback, which boto3 then uses."""
    _empty()
    api = Api()
    api.consistency = Consistency(itertools.count(step=1000.0).__next__)  # so that every effect is visible at once
    server = make_server("127.0.0.1", 0, api, threaded=True, request_handler=QuietHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    users = iam_backends[ACCOUNT]["aws"]
    users.create_user(file.region, "laptop")
    key = users.create_access_key("laptop")
    moto_instances.publish_image(file.region, moto_instances.IMAGE)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": key.access_key_id,
        "AWS_SECRET_ACCESS_KEY": key.secret_access_key,
    }.items():
        patch.setenv(name, value)
    patch.delenv("AWS_SESSION_TOKEN", raising=False)
    patch.setattr(boto3, "DEFAULT_SESSION", None)
    account = EmulatedAccount(api, cluster_file.load(), settings_file)
    account.allow(["*"])
    yield account
    server.shutdown()
    _empty()


def _empty() -> None:
    stack_resources.PLACEMENT_GROUPS.clear()
    moto_state.empty(SERVICES)
