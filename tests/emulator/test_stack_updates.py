"""Test that no change of settings.toml makes a later `prepare` fail without saying what to do.

CloudFormation replaces some resources, and cannot replace one that has a fixed name.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from emulator.emulated_account import EmulatedAccount
from raymill.aws import launcher_file, prepare, stack, teardown
from raymill.aws.target import Aws
from raymill.common import instances
from raymill.emulator import registry, stack_resources, stack_updates
from raymill.emulator.moto_instances import ACCOUNT
from raymill.errors import UserError

NETWORK, BUDGET, CAPACITY, IAM = "cluster.network", "cluster.budget", "cluster.capacity", "cluster.iam"
BOUNDARY = f"arn:aws:iam::{ACCOUNT}:policy/limits"
OFF = [
    (NETWORK, 'certificate = ""', 'clients = ""'),
    (BUDGET, "dollars_per_month = 0"),
    (IAM, 'permissions_boundary = ""'),
    (NETWORK, "private = false"),
    (NETWORK, "efa = true"),
    (NETWORK, "callers = []"),
]
"""Changes that restore the default settings, except those of the reservation, which a stack keeps."""


def parameters_of(template: dict[str, Any], part: Any) -> set[str]:
    """Return the parameters of which a part of a property's value depends, as the template refers to them."""
    found: set[str] = set()
    for name in stack_updates._references(part):
        if name in template["Parameters"]:
            found.add(name)
        elif name in template["Resources"]:
            found |= replacing_parameters(template, name)
    for name in re.findall(r"'Fn::If': \['(\w+)'", str(part)):
        found |= condition_parameters(template, name)
    return found


def condition_parameters(template: dict[str, Any], name: str) -> set[str]:
    text = str(template["Conditions"][name])
    found = set(re.findall(r"'Ref': '(\w+)'", text))
    return found.union(*(condition_parameters(template, one) for one in re.findall(r"'Condition': '(\w+)'", text)))


def replacing_parameters(template: dict[str, Any], name: str) -> set[str]:
    """Return the parameters of which a change can replace a resource."""
    body = template["Resources"][name]
    forcing = registry.force_replacement(body["Type"])
    values = [registry.value(body.get("Properties", {}), path) for path in forcing]
    return set().union(*(parameters_of(template, value) for value in values))


def fixed_names(template: dict[str, Any]) -> Iterator[str]:
    """Yield the resources with a name that stack.yaml sets, and of which a change would replace the resource."""
    for name, body in template["Resources"].items():
        forcing = registry.force_replacement(body["Type"])
        if any(path in forcing and registry.value(body["Properties"], path) for path in registry.NAMES):
            yield name


@pytest.mark.parametrize("makes_network", [True, False])
def test_only_another_vpc_could_replace_what_has_a_fixed_name(makes_network: bool) -> None:
    """`prepare` refuses another VPC in words: see `vpc.find_network`."""
    template = stack.template(4, makes_network=makes_network)
    named = list(fixed_names(template))
    assert {"Group", "Head", "HeadRole", "HeadProfile", "Guard", "Https", "Bucket"} <= set(named)
    assert set().union(*(replacing_parameters(template, name) for name in named)) - {"BucketName"} == {"Vpc"}


def resources_of(account: EmulatedAccount) -> set[str]:
    pages = account.file.client("cloudformation").get_paginator("list_stack_resources")
    listed = pages.paginate(StackName=account.file.slug)
    return {one["LogicalResourceId"] for page in listed for one in page["StackResourceSummaries"]}


def what_costs_money(account: EmulatedAccount) -> list[str]:
    """Return the kinds of what the account has besides machines."""
    ec2, state = account.file.client("ec2"), [{"Name": "state", "Values": ["available"]}]
    found = {
        "NAT gateway": ec2.describe_nat_gateways(Filters=state)["NatGateways"],
        "address": ec2.describe_addresses()["Addresses"],
        "load balancer": account.file.client("elbv2").describe_load_balancers()["LoadBalancers"],
        "budget": account.file.client("budgets").describe_budgets(AccountId=ACCOUNT)["Budgets"],
    }
    return [kind for kind, ones in found.items() if ones]


def group_id(account: EmulatedAccount) -> str:
    named = [{"Name": "group-name", "Values": [account.file.slug]}]
    (group,) = account.file.client("ec2").describe_security_groups(Filters=named)["SecurityGroups"]
    return group["GroupId"]


def reserve(account: EmulatedAccount, name: str, zone: str) -> tuple[str, str]:
    instance_type = account.file.workers[-1].instance_type
    zone = account.file.region + zone
    account.api.reservations.put(name, zone=zone, instance_type=instance_type, count=1, start_s=-60, end_s=86400)
    return CAPACITY, f'reservation = "{name}"'


def certificates(account: EmulatedAccount) -> list[str]:
    acm = account.file.client("acm")
    return [acm.request_certificate(DomainName=f"{n}.example.org")["CertificateArn"] for n in "ab"]


def test_every_change_of_the_settings_works_and_can_be_undone(account: EmulatedAccount) -> None:
    one, two = certificates(account)
    prepare.prepare(account.file)
    fresh, group = resources_of(account), group_id(account)
    changes = [
        (BUDGET, "dollars_per_month = 2000", 'email = "a@example.com"'),
        (BUDGET, 'email = "b@example.com"'),
        (BUDGET, "dollars_per_month = 3000"),
        (NETWORK, f'certificate = "{one}"', 'clients = "198.51.100.0/24"'),
        (NETWORK, f'certificate = "{two}"', 'clients = "198.51.0.0/16"'),
        ("serve", "port = 8443"),
        (NETWORK, 'callers = ["203.0.113.7/32", "198.51.100.9/32"]'),
        (IAM, f'permissions_boundary = "{BOUNDARY}"'),
        (IAM, f'permissions_boundary = "{BOUNDARY}-2"'),
        reserve(account, "cr-1", "b"),
        (NETWORK, "private = true"),
        reserve(account, "cr-2", "f"),
        (NETWORK, "efa = false"),
        ("serve", "port = 8000"),
    ]
    for section, *assignments in changes:
        account.assign(section, *assignments)
        prepare.prepare(account.file)
        assert group_id(account) == group, "the cluster's machines are in this group"
    assert what_costs_money(account) == ["NAT gateway", "address", "load balancer", "budget"]
    for section, *assignments in OFF:
        account.assign(section, *assignments)
        prepare.prepare(account.file)
    assert resources_of(account) - fresh == {"SubnetOfReservation", "RouteOfReservation", "Reserved", "ReservedLaunch"}
    assert resources_of(account) >= fresh
    assert what_costs_money(account) == []
    assert len(stack_resources.PLACEMENT_GROUPS) == 3
    prepare.delete(account.file)
    assert teardown.leftovers(account.file) == []


def test_the_users_subnets_can_change_only_inside_their_vpc(account: EmulatedAccount) -> None:
    ec2 = account.file.client("ec2")
    subnets = [one["SubnetId"] for one in ec2.describe_subnets()["Subnets"]]
    other_vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    zone = f"{account.file.region}a"
    foreign = ec2.create_subnet(VpcId=other_vpc, CidrBlock="10.9.0.0/24", AvailabilityZone=zone)["Subnet"]["SubnetId"]
    account.assign(NETWORK, f'subnets = ["{subnets[0]}", "{subnets[1]}"]')
    (certificate, _) = certificates(account)
    changes = [
        (NETWORK, f'certificate = "{certificate}"', 'clients = "198.51.100.0/24"'),
        (NETWORK, f'subnets = ["{subnets[2]}", "{subnets[1]}"]'),
        (NETWORK, f'head_subnet = "{subnets[0]}"', "private = true"),
        (NETWORK, "private = false", "efa = false"),
    ]
    prepare.prepare(account.file)
    group = group_id(account)
    for section, *assignments in changes:
        account.assign(section, *assignments)
        prepare.prepare(account.file)
        assert group_id(account) == group
    account.assign(NETWORK, f'subnets = ["{foreign}"]', 'head_subnet = ""', 'certificate = ""', 'clients = ""')
    with pytest.raises(UserError, match=rf"is in vpc-\w+, and .* mean {other_vpc}\. To move it, run: inv down"):
        prepare.prepare(account.file)
    account.assign(NETWORK, "subnets = []")
    with pytest.raises(UserError, match=r"is in vpc-\w+, and .* mean a VPC of its own"):
        prepare.prepare(account.file)
    prepare.delete(account.file)
    prepare.prepare(account.file)
    account.assign(NETWORK, f'subnets = ["{foreign}"]')
    with pytest.raises(UserError, match=rf"is in a VPC of its own, and .* mean {other_vpc}"):
        prepare.prepare(account.file)


def targets(account: EmulatedAccount) -> dict[str, list[int]]:
    """Return to which ports of which instances each target group forwards requests."""
    elb = account.file.client("elbv2")
    groups = [one["TargetGroupArn"] for one in elb.describe_target_groups()["TargetGroups"]]
    healths = {one: elb.describe_target_health(TargetGroupArn=one)["TargetHealthDescriptions"] for one in groups}
    return {one: [health["Target"]["Port"] for health in found] for one, found in healths.items()}


def test_after_another_port_the_load_balancer_still_reaches_the_head(
    account: EmulatedAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port replaces the target group, and nothing is registered in a new one."""
    monkeypatch.setattr(Aws, "_admit_people", lambda self, file: None)
    (certificate, _) = certificates(account)
    account.assign(NETWORK, f'certificate = "{certificate}"', 'clients = "198.51.100.0/24"')
    prepare.prepare(account.file)
    account.launch(account.file.head.name)
    for port in (8000, 8443):
        account.assign("serve", f"port = {port}")
        Aws().prepare()
        assert list(targets(account).values()) == [[port]]


def test_subnets_and_placement_groups_stay_while_workers_run_in_them(account: EmulatedAccount) -> None:
    """AWS would update the stack, and keep them without an owner, so that `down` cannot delete the VPC."""
    account.assign(NETWORK, "private = true")
    account.assign(*reserve(account, "cr-1", "b"))
    prepare.prepare(launcher_file.load())
    for key, (section, assignment), node_type in (
        ("efa", (NETWORK, "efa = false"), "gpu-spot-1"),
        ("private", (NETWORK, "private = false"), "gpu-spot-1"),
        ("reservation", reserve(account, "cr-2", "f"), "gpu-reserved"),
    ):
        worker = account.launch(node_type)
        account.assign(section, assignment)
        with pytest.raises(UserError, match=rf"{key} in settings.toml cannot .* run \({worker}\)"):
            prepare.prepare(launcher_file.load())
        instances.terminate(account.file, [worker])
        prepare.prepare(launcher_file.load())
    assert Aws().down() == []
