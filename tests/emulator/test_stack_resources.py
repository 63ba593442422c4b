"""Test that the emulated CloudFormation makes and deletes the project's stack, and refuses what it does not model."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from moto import mock_aws

from raymill.aws import stack, vpc, zones
from raymill.common import cluster_file
from raymill.common.cluster_file import ClusterFile
from raymill.emulator import iam, stack_resources, stack_updates
from raymill.emulator.moto_instances import ACCOUNT
from raymill.ray_support.aws_sections import NetworkSection

CARDS = 4


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterFile]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setattr(stack_resources, "PLACEMENT_GROUPS", set())
    assert stack_updates.CALLER.get() is None
    with mock_aws():
        yield cluster_file.load()


def deploy(file: ClusterFile, **changes: str) -> None:
    parameters = {
        **vpc.find_network(file, NetworkSection()).stack_parameters,
        **{"Private": "no", "Efa": "yes", "Caller": "192.0.2.1/32", "BucketName": "work", "MakeBucket": "yes"},
    }
    stack.deploy(file, parameters | changes, CARDS if changes.get("Private") == "yes" else 1, owner="somebody")


def default_routes(file: ClusterFile) -> list[str]:
    """Return the kind of gateway to which each subnet of the stack sends internet traffic."""
    subnets = file.client("ec2").describe_subnets(Filters=[{"Name": "tag:ray-project", "Values": [file.slug]}])
    return sorted(vpc.default_route(file, subnet).partition("-")[0] for subnet in subnets["Subnets"])


def interfaces(file: ClusterFile, name: str) -> list[dict[str, Any]]:
    """Return the network interfaces of a launch template."""
    versions = file.client("ec2").describe_launch_template_versions(
        LaunchTemplateName=f"{file.slug}-{name}", Versions=["$Latest"]
    )
    return versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]["NetworkInterfaces"]


def test_the_stack_makes_a_public_network_with_efa(file: ClusterFile) -> None:
    deploy(file)
    assert default_routes(file) == ["igw", "igw", "igw"]
    for zone in (1, 2, 3):
        (card,) = interfaces(file, f"gpu-{zone}")
        assert (card["InterfaceType"], card["AssociatePublicIpAddress"]) == ("efa", True)
    (head,) = interfaces(file, "head")
    assert "InterfaceType" not in head


def test_a_private_network_has_a_nat_gateway_and_all_cards(file: ClusterFile) -> None:
    deploy(file, Private="yes")
    assert default_routes(file) == ["igw", "igw", "igw", "nat", "nat", "nat"]
    first, *others = interfaces(file, "gpu-2")
    assert (first["InterfaceType"], first["AssociatePublicIpAddress"]) == ("efa", False)
    assert [card["NetworkCardIndex"] for card in others] == [1, 2, 3]
    assert {card["InterfaceType"] for card in others} == {"efa-only"}
    assert {card["SubnetId"] for card in others} == {first["SubnetId"]}
    assert interfaces(file, "head")[0]["AssociatePublicIpAddress"] is True


def test_the_users_subnets_stay_as_they_are(file: ClusterFile) -> None:
    ec2 = file.client("ec2")
    own = [subnet["SubnetId"] for subnet in ec2.describe_subnets()["Subnets"]][:2]
    before = ec2.describe_vpcs()["Vpcs"], ec2.describe_route_tables()["RouteTables"], ec2.describe_subnets()["Subnets"]
    deploy(file, **vpc.find_network(file, NetworkSection(subnets=tuple(own))).stack_parameters)
    assert [card["SubnetId"] for zone in (1, 2, 3) for card in interfaces(file, f"gpu-{zone}")] == [*own, own[0]]
    after = ec2.describe_vpcs()["Vpcs"], ec2.describe_route_tables()["RouteTables"], ec2.describe_subnets()["Subnets"]
    assert after == before


@pytest.mark.parametrize("private", ["yes", "no"])
def test_reserved_instances_start_in_the_zone_of_their_reservation(file: ClusterFile, private: str) -> None:
    deploy(file, Private=private, ReservedZone="us-east-1f", ReservedCidr="10.0.245.0/24")
    subnet = interfaces(file, "reserved")[0]["SubnetId"]
    (found,) = file.client("ec2").describe_subnets(SubnetIds=[subnet])["Subnets"]
    assert found["AvailabilityZone"] == "us-east-1f"
    assert vpc.default_route(file, found).startswith("nat-" if private == "yes" else "igw-")


def test_group_rules_for_efa(file: ClusterFile) -> None:
    deploy(file)
    groups = file.client("ec2").describe_security_groups(Filters=[{"Name": "group-name", "Values": [file.slug]}])
    (group,) = groups["SecurityGroups"]
    for rules in (group["IpPermissions"], group["IpPermissionsEgress"]):
        assert [pair["GroupId"] for rule in rules for pair in rule["UserIdGroupPairs"]] == [group["GroupId"]]
    assert [one["CidrIp"] for rule in group["IpPermissionsEgress"] for one in rule["IpRanges"]] == ["0.0.0.0/0"]


def test_a_rule_for_outgoing_traffic_replaces_the_default(file: ClusterFile) -> None:
    """Without the explicit rule for all addresses, instances could not download packages."""
    ec2 = file.client("ec2")
    (network, *_) = ec2.describe_vpcs()["Vpcs"]
    template = {
        "Resources": {
            "Group": {
                "Type": "AWS::EC2::SecurityGroup",
                "Properties": {"GroupName": "a", "GroupDescription": "b", "VpcId": network["VpcId"]},
            },
            "Rule": {
                "Type": "AWS::EC2::SecurityGroupEgress",
                "Properties": {
                    **{"GroupId": {"Fn::GetAtt": ["Group", "GroupId"]}, "IpProtocol": "-1"},
                    "DestinationSecurityGroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
                },
            },
        }
    }
    file.client("cloudformation").create_stack(StackName="mine", TemplateBody=str(template).replace("'", '"'))
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["a"]}])["SecurityGroups"]
    assert [one for rule in group["IpPermissionsEgress"] for one in rule["IpRanges"]] == []


@pytest.mark.parametrize("private", ["yes", "no"])
def test_the_stack_is_deleted_in_order(file: ClusterFile, private: str) -> None:
    ec2 = file.client("ec2")
    before = [ec2.describe_vpcs()["Vpcs"], ec2.describe_internet_gateways()["InternetGateways"]]
    deploy(file, Private=private)
    assert len(ec2.describe_vpcs()["Vpcs"]) == 2
    stack.delete(file)
    assert [ec2.describe_vpcs()["Vpcs"], ec2.describe_internet_gateways()["InternetGateways"]] == before
    assert ec2.describe_addresses()["Addresses"] == []
    assert not stack_resources.PLACEMENT_GROUPS


def test_a_budget_exists_only_with_an_address(file: ClusterFile) -> None:
    budgets = file.client("budgets")
    deploy(file)
    assert budgets.describe_budgets(AccountId=ACCOUNT)["Budgets"] == []
    stack.delete(file)
    deploy(file, MakeBucket="no", BudgetDollars="2000.00", BudgetEmail="you@example.com")
    (budget,) = budgets.describe_budgets(AccountId=ACCOUNT)["Budgets"]
    assert (float(budget["BudgetLimit"]["Amount"]), budget["TimeUnit"]) == (2000, "MONTHLY")
    found = budgets.describe_notifications_for_budget(AccountId=ACCOUNT, BudgetName=budget["BudgetName"])
    assert [(one["NotificationType"], one["Threshold"]) for one in found["Notifications"]] == [
        ("ACTUAL", 80),
        ("FORECASTED", 100),
    ]
    stack.delete(file)
    assert budgets.describe_budgets(AccountId=ACCOUNT)["Budgets"] == []


def test_the_zones_stay_the_same(file: ClusterFile) -> None:
    deploy(file)
    kept = vpc.find_network(file, NetworkSection()).zones
    changed = {name: {"us-east-1f", kept[2]} for name in zones.offered(file)}
    assert vpc.find_network(file, NetworkSection(), changed).zones == kept


def test_the_template_is_short_enough_for_the_type_with_most_cards() -> None:
    """CloudFormation accepts 51,200 bytes. A slug may have 30 characters, and "my-llm" has 6."""
    body = stack.body(32, makes_network=True)
    assert len(body) + 24 * body.count(cluster_file.load().slug) < 51_200


def test_everything_in_the_stack_is_modeled() -> None:
    stack_resources.refuse_unmodeled(stack.template(CARDS, makes_network=True))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"Type": "AWS::Scheduler::Schedule", "Properties": {}}, "AWS::Scheduler::Schedule of the resource Bucket"),
        (
            {"Type": "AWS::S3::Bucket", "Properties": {"LifecycleConfiguration": {}}},
            "AWS::S3::Bucket.LifecycleConfiguration of the resource Bucket",
        ),
    ],
)
def test_what_is_not_modeled_is_refused(change: dict[str, Any], named: str) -> None:
    template = copy.deepcopy(stack.template(CARDS, makes_network=True))
    template["Resources"]["Bucket"] = change
    with pytest.raises(iam.AwsError, match="does not model") as raised:
        stack_resources.refuse_unmodeled(template)
    assert named in raised.value.message
