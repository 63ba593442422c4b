"""Test that the emulated EC2 ends instances during their launch if they may not use the key for their disks."""

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.ec2.models import ec2_backends
from moto.kms.models import kms_backends

from raymill import settings
from raymill.aws import stack
from raymill.emulator import iam, moto_instances
from raymill.emulator.launches import MANAGED_KEY, LaunchFailures, disk_key
from raymill.emulator.moto_instances import ACCOUNT, MotoInstance

REGION = "us-east-1"


@pytest.fixture
def instance() -> Iterator[MotoInstance]:
    with mock_aws():
        ec2 = boto3.client("ec2", region_name=REGION)
        ec2.run_instances(ImageId=moto_instances.IMAGE, InstanceType="p4d.24xlarge", MinCount=1, MaxCount=1)
        yield next(moto_instances.list_all())


def encrypt_disks() -> None:
    """Encrypt the account's disks with a key of its own."""
    key = kms_backends[ACCOUNT][REGION].create_key("", "ENCRYPT_DECRYPT", "SYMMETRIC_DEFAULT", "mine", None)
    ec2_backends[ACCOUNT][REGION].modify_ebs_default_kms_key_id(key.arn)


def head_statements() -> list[dict[str, Any]]:
    """Return the statements of the head's role about keys, with the region and the account filled in."""
    content = stack.parse((settings.PROJECT / "cluster" / "stack.yaml").read_text(encoding="utf-8"))
    policies = [one["Properties"] for one in content["Resources"].values() if one["Type"] == "AWS::IAM::Policy"]
    found = [one for policy in policies for one in policy["PolicyDocument"]["Statement"] if "kms:" in str(one)]
    names = {"${AWS::Partition}": "aws", "${AWS::Region}": REGION, "${AWS::AccountId}": ACCOUNT}

    def filled(value: Any) -> Any:
        if isinstance(value, dict) and list(value) == ["Fn::Sub"]:
            value = value["Fn::Sub"]
            for name, text in names.items():
                value = value.replace(name, text)
            return value
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        return [filled(item) for item in value] if isinstance(value, list) else value

    return [filled(one) for one in found]


def ends(instance: MotoInstance, statements: list[dict[str, Any]]) -> bool:
    failures = LaunchFailures()
    failures.note_launch(REGION, iam.Principal("arn:aws:iam::123456789012:role/head", statements), [instance.id])
    return failures.end(instance)


def test_awss_own_key_needs_no_permission(instance: MotoInstance) -> None:
    assert disk_key(REGION) == MANAGED_KEY
    assert not ends(instance, [])


def test_without_permission_for_the_key_a_launch_ends(instance: MotoInstance) -> None:
    encrypt_disks()
    assert ends(instance, [])
    assert instance.moto.state == "terminated"
    assert instance.moto.state_reason.code == "Client.InternalError"


def test_the_heads_role_may_use_the_key(instance: MotoInstance) -> None:
    encrypt_disks()
    assert not ends(instance, head_statements())
    direct = iam.Permission("kms:Decrypt", disk_key(REGION), {"kms:ViaService": f"sqs.{REGION}.amazonaws.com"})
    assert not iam.is_allowed(head_statements(), direct), "other services may not use the key in the head's name"
