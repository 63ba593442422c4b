"""Test that the accounts and regions of the emulated AWS have separate resources."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.ec2.models import ec2_backends
from moto.ec2.models.subnets import Subnet

from raymill.emulator import iam, moto_instances, permissions, stubs
from raymill.emulator.consistency import Consistency
from raymill.emulator.moto_instances import ACCOUNT, IMAGE, OTHER_ACCOUNT
from raymill.emulator.reservations import Reservations

FIELDS: dict[str, Any] = {"zone": "us-east-1b", "instance_type": "p4d.24xlarge", "count": 2}


def test_the_arns_of_a_call_are_in_the_callers_account() -> None:
    launch = {"ImageId": "ami-1", "KeyName": "mine", "IamInstanceProfile.Name": "mine-worker"}
    for account in (ACCOUNT, OTHER_ACCOUNT):
        found = permissions.required_by("ec2", "RunInstances", "us-east-1", launch, {}, account)
        assert {one.resource.split(":")[4] for one in found} == {account, ""}  # images belong to no account
        (secret,) = permissions.required_by(
            "secretsmanager", "GetSecretValue", "us-east-1", {"SecretId": "mine/HF_TOKEN"}, {}, account
        )
        assert iam.account_of(secret.resource) == account


@pytest.mark.parametrize(
    ("account", "region", "is_found"),
    [(ACCOUNT, "us-east-1", True), (ACCOUNT, "us-west-2", False), (OTHER_ACCOUNT, "us-east-1", False)],
)
def test_a_reservation_is_found_only_in_its_account_and_region(account: str, region: str, *, is_found: bool) -> None:
    reservations = Reservations()
    reservations.put("cr-1", start_s=-3600, end_s=3600, **FIELDS)
    everything = reservations.respond("DescribeCapacityReservations", region, {}, account)
    assert everything
    assert ("cr-1" in everything) == is_found
    asked = {"CapacityReservationId.1": "cr-1"}
    if is_found:
        assert "cr-1" in (reservations.respond("DescribeCapacityReservations", region, asked, account) or "")
    else:
        with pytest.raises(iam.AwsError, match="does not exist"):
            reservations.respond("DescribeCapacityReservations", region, asked, account)


def test_lists_and_names_of_secrets_lag_only_where_they_are() -> None:
    seen = Consistency(lambda: 0.0)
    seen.keep_list({}, b"old", f"{ACCOUNT} us-east-1")
    assert seen.stale_list("ListSecrets", {}, f"{ACCOUNT} us-east-1") == b"old"
    assert seen.stale_list("ListSecrets", {}, f"{OTHER_ACCOUNT} us-east-1") is None
    seen.check("DeleteSecret", {"SecretId": "mine/HF_TOKEN"}, f"{ACCOUNT} us-east-1")
    seen.check("CreateSecret", {"Name": "mine/HF_TOKEN"}, f"{OTHER_ACCOUNT} us-east-1")
    with pytest.raises(iam.AwsError, match="already scheduled for deletion"):
        seen.check("CreateSecret", {"Name": "mine/HF_TOKEN"}, f"{ACCOUNT} us-east-1")


def test_all_machines_of_a_launch_get_the_profile_in_the_callers_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("MOTO_ACCOUNT_ID", OTHER_ACCOUNT)
    with mock_aws():
        clients = boto3.client("iam"), boto3.client("ec2", region_name="us-west-2")
        clients[0].create_role(RoleName="mine", AssumeRolePolicyDocument="{}")
        clients[0].create_instance_profile(InstanceProfileName="mine")
        clients[0].add_role_to_instance_profile(InstanceProfileName="mine", RoleName="mine")
        clients[1].run_instances(ImageId=IMAGE, MinCount=2, MaxCount=2, IamInstanceProfile={"Name": "mine"})
        started = moto_instances.complete(OTHER_ACCOUNT, "us-west-2", {"IamInstanceProfile.Name": "mine"})
        found = {(one.account, one.region, one.role, one.id) for one in moto_instances.list_all()}
    assert found == {(OTHER_ACCOUNT, "us-west-2", "mine", one) for one in started}
    assert len(started) == 2


def test_the_disk_key_is_that_of_the_callers_account() -> None:
    principal = iam.Principal(f"arn:aws:iam::{OTHER_ACCOUNT}:user/me", [])
    answer = stubs.respond("ec2", "GetEbsDefaultKmsKeyId", "us-east-1", {}, principal)
    assert "alias/aws/ebs" in (answer or "")


@mock_aws
def test_instances_in_two_vpcs_or_accounts_have_different_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subnet, "get_available_subnet_ip", Subnet.get_available_subnet_ip)  # restored at the end
    moto_instances.install_unique_addresses()
    clients = [boto3.client("ec2", region_name=region) for region in ("us-east-1", "us-east-1", "us-west-2")]
    addresses = []
    for ec2 in clients:
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
        launch = {"ImageId": IMAGE, "MinCount": 2, "MaxCount": 2, "SubnetId": subnet}
        addresses += [one["PrivateIpAddress"] for one in ec2.run_instances(**launch)["Instances"]]
    assert len(set(addresses)) == 6


@mock_aws
def test_instances_are_listed_while_requests_change_their_tags() -> None:
    """The emulator lists them ten times per second. An error there would end the emulated AWS."""
    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
    boto3.client("ec2", "us-east-1", **keys).run_instances(ImageId=IMAGE, MinCount=20, MaxCount=20)
    backend, ids = ec2_backends[ACCOUNT]["us-east-1"], [one.id for one in moto_instances.list_all()]
    done = threading.Event()

    def change() -> None:
        for number in itertools.count():
            if done.is_set():
                return
            backend.create_tags(ids, {f"key-{number % 50}": "value"})
            backend.delete_tags(ids, {f"key-{(number - 25) % 50}": "value"})

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        try:
            assert all(len(list(moto_instances.list_all())) == 20 for _ in range(3000))
        finally:
            done.set()
        changing.result()
