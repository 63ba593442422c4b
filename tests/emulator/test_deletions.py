"""Test that `down` deletes everything although resources vanish or stay in use, and says what it could not delete."""

from collections import Counter
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto.ec2.models import ec2_backends
from moto.ec2.models.spot_requests import SpotInstanceRequest

from emulator.emulated_account import EmulatedAccount
from raymill.aws import aws_errors, deletion, guard, prepare, secrets_manager, stack, teardown
from raymill.aws.target import Aws
from raymill.common import instances
from raymill.emulator.deletions import GONE
from raymill.emulator.moto_instances import ACCOUNT, IMAGE


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "RETRY_S", 0.01)
    monkeypatch.setattr(stack, "POLL_S", 0.01)
    monkeypatch.setattr(teardown, "SETTLE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(instances, "UNKNOWN_S", 1)


@pytest.fixture
def up(account: EmulatedAccount, monkeypatch: pytest.MonkeyPatch) -> EmulatedAccount:
    """Return an account with a head, a spot worker, two orphans of each kind and a secret."""
    filter_value = SpotInstanceRequest.get_filter_value

    def with_key_name(self: Any, name: str, *args: Any) -> Any:
        is_key = name == "launch.key-name"  # moto lacks this filter
        return self.launch_specification.key_name if is_key else filter_value(self, name, *args)

    monkeypatch.setattr(SpotInstanceRequest, "get_filter_value", with_key_name)
    prepare.prepare(account.file)
    account.launch(account.file.head.name)
    account.launch("gpu-spot-1")
    ec2, tags = account.file.client("ec2"), [{"Key": "ray-project", "Value": account.file.slug}]
    zone = f"{account.file.region}a"
    for _ in range(2):
        ec2.create_volume(AvailabilityZone=zone, Size=1, TagSpecifications=[{"ResourceType": "volume", "Tags": tags}])
        ec2.create_network_interface(
            SubnetId=ec2.describe_subnets()["Subnets"][0]["SubnetId"],
            TagSpecifications=[{"ResourceType": "network-interface", "Tags": tags}],
        )
    launch = {"KeyName": account.file.slug, "ImageId": IMAGE}
    ec2.request_spot_instances(InstanceCount=2, LaunchSpecification=launch)
    for request in ec2_backends[ACCOUNT][account.file.region].spot_instance_requests.values():
        request.state = "open"
    secrets_manager.upload(account.file)
    return account


def test_what_vanishes_before_its_deletion_is_deleted(up: EmulatedAccount) -> None:
    up.api.deletions.gone = Counter(dict.fromkeys(GONE, 1))
    assert Aws().down() == []
    assert +up.api.deletions.gone == Counter(), "each kind has vanished once"


def test_what_is_in_use_for_some_more_seconds_is_deleted(up: EmulatedAccount) -> None:
    up.api.deletions.in_use = Counter(DeleteVolume=2, DeleteNetworkInterface=3)
    assert Aws().down() == []


def test_what_stays_in_use_is_named_with_the_reason_and_the_rest_is_deleted(
    up: EmulatedAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "RELEASE_TIMEOUT_S", 0.0)
    up.api.deletions.in_use = Counter(DeleteVolume=1)
    volume, reason = Aws().down()
    assert reason == f"{volume}, because AWS rejected DeleteVolume (VolumeInUse: it is in use)"
    assert Aws().down() == []


@pytest.mark.parametrize(
    ("action", "kept"),
    [
        ("ec2:DescribeVolumes", "volume"),
        ("cloudformation:DeleteStack", "stack"),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (
                ("ec2:DeleteVolume", "volume"),
                ("ec2:CancelSpotInstanceRequests", "spot"),
                ("ec2:DeleteKeyPair", "key"),
                ("secretsmanager:DeleteSecret", "secret"),
                ("scheduler:DeleteSchedule", "the"),
            )
        ),
    ],
)
def test_without_a_permission_the_rest_is_deleted(up: EmulatedAccount, action: str, kept: str) -> None:
    up.deny(action)
    left = Aws().down()
    assert any(f"because you lack the permission {action}" in text for text in left), left
    up.deny()
    found = {text.partition(" ")[0] for text in teardown.leftovers(up.file)}
    of_stack = {"instance", "launch", "role", "security", "VPC"} if kept == "stack" else set()
    assert found == {kept} | of_stack
    assert Aws().down() == []


def test_while_an_instance_cannot_be_ended_the_others_end_and_the_guard_stays(up: EmulatedAccount) -> None:
    """The guard ends instances after the limit in hours. It needs its schedule and the stack."""
    protected = up.launch("cpu")
    (moto,) = [one for one in up.instances() if one.id == protected]
    moto.disable_api_termination = True
    left = Aws().down()
    assert f"instance {protected} (running)" in left
    assert any(text.startswith("instances, because AWS rejected TerminateInstances") for text in left), left
    assert [one.id for one in instances.living(up.file)] == [protected]
    assert guard.exists(up.file)
    assert stack.find(up.file)
    moto.disable_api_termination = False
    assert Aws().down() == []


def test_an_instance_that_is_long_gone_does_not_keep_the_others(up: EmulatedAccount) -> None:
    first, second = (one.id for one in instances.living(up.file))
    instances.terminate(up.file, [first, "i-0123456789abcdef0", second])
    assert instances.living(up.file) == []


@pytest.mark.parametrize("code", [*GONE.values(), "ResourceNotFoundException", "NoSuchEntity", "NoSuchBucket"])
def test_every_error_about_something_that_does_not_exist_is_known(code: str) -> None:
    assert aws_errors.is_missing(ClientError({"Error": {"Code": code, "Message": ""}}, "Delete"))
    assert not aws_errors.is_missing(ClientError({"Error": {"Code": "VolumeInUse", "Message": ""}}, "Delete"))
