"""Test that the doctor asks for the permissions that CloudFormation uses, and that a caller needs nothing else."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
from moto.iam.models import iam_backends

from emulator.emulated_account import EmulatedAccount
from raymill.aws import guard, load_balancer, prepare, secrets_manager, stack
from raymill.aws.doctor import checks, permissions
from raymill.aws.target import Aws
from raymill.emulator import iam, registry, stack_updates
from raymill.emulator.moto_instances import ACCOUNT
from raymill.errors import UserError

BOUNDARY = f"arn:aws:iam::{ACCOUNT}:policy/limits"
OPTIONS = {
    "MakesBucket": permissions.BUCKET_ACTIONS,
    "MakesNetwork": permissions.VPC_ACTIONS,
    "MakesNat": permissions.NAT_ACTIONS,
    "HasHttps": permissions.HTTPS_ACTIONS,
    "HasBudget": permissions.BUDGET_ACTIONS,
}
"""The additional actions for resources with a condition."""
ALWAYS = (permissions.ACTIONS, permissions.BOUNDARY_ACTIONS, permissions.NO_BOUNDARY_ACTIONS)
CHANGED = (
    *("SecurityGroup", "LaunchTemplate", "Policy", "Role", "LoadBalancer", "Listener", "Budget"),
    "Function",  # its code may change in a later version of the template
)
"""Resource types that an update can change in place."""
ELSEWHERE = {
    *("ec2:DescribeLaunchTemplateVersions", "ec2:CreateTags", "pricing:GetProducts"),  # inv rehearse
    *("ec2:DeleteVolume", "ec2:DeleteNetworkInterface", "ec2:CancelSpotInstanceRequests"),  # test_deletions.py
    *("elasticloadbalancing:SetSubnets", "cloudformation:DescribeStackEvents"),  # the other tests of stacks
    *("secretsmanager:GetSecretValue", "secretsmanager:PutSecretValue"),  # inv keys
    "secretsmanager:UpdateSecretVersionStage",
    *("lambda:UpdateFunctionCode", "lambda:UpdateFunctionConfiguration"),  # a later version of stack.yaml
}
"""Actions that the test below does not use, and what uses them."""


def actions_of(*claims: Mapping[str, str]) -> set[str]:
    return set(" ".join(text for one in claims for text in one.values()).split())


EVERYTHING = actions_of(*ALWAYS, *OPTIONS.values(), permissions.BALANCING_ACTIONS, permissions.RESERVATION_ACTIONS)


def needs() -> Iterator[tuple[str, str]]:
    """Yield the actions that CloudFormation uses for the stack, each with the condition of its resource."""
    for body in stack.template(4, makes_network=True)["Resources"].values():
        handlers = ["create"] if body.get("DeletionPolicy") == "Retain" else ["create", "delete"]
        handlers += ["update"] if body["Type"].rpartition(":")[2] in CHANGED else []
        for handler in handlers:
            for action in registry.actions(body["Type"], handler):
                yield body.get("Condition", ""), action


def test_the_doctor_asks_for_what_cloudformation_uses() -> None:
    for condition, action in needs():
        network = [OPTIONS["MakesNetwork"]] if condition in ("MakesNat", "MakesReservedSubnet") else []
        claimed = actions_of(*ALWAYS, *network, OPTIONS.get(condition, {}))
        assert action in claimed, f"{action} for resources with the condition {condition or 'none'}"


@pytest.mark.parametrize("kind", registry.UNUSED)
def test_the_registry_lists_every_permission_that_is_left_out(kind: str) -> None:
    """Otherwise an exception could hide a permission that a later version of the registry adds."""
    listed = {action for handler in registry.schema(kind)["handlers"].values() for action in handler["permissions"]}
    assert any(re.fullmatch(registry.UNUSED[kind], action) for action in listed)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the set of actions that CloudFormation uses from now on."""
    used: set[str] = set()

    def authorize(principal: iam.Principal, needed: Iterable[iam.Permission]) -> None:
        needed = list(needed)
        used.update(one.action for one in needed)
        iam.authorize(principal, needed)

    monkeypatch.setattr(stack_updates, "authorize", authorize)
    return used


def live_with_every_option(account: EmulatedAccount) -> None:
    """Prepare and change a cluster with all options, launch machines, and take it down."""
    ask = account.file.client("acm").request_certificate
    one, two = (ask(DomainName=f"{name}.example.org")["CertificateArn"] for name in "ab")
    zone, gpu_type = f"{account.file.region}f", account.file.workers[-1].instance_type
    account.api.reservations.put("cr-1", zone=zone, instance_type=gpu_type, count=1, start_s=-60, end_s=86400)
    account.assign("cluster.network", f'certificate = "{one}"', 'clients = "198.51.100.0/24"', "private = true")
    account.assign("cluster.budget", "dollars_per_month = 10", 'email = "a@example.com"')
    account.assign("cluster.iam", f'permissions_boundary = "{BOUNDARY}"')
    account.assign("cluster.capacity", 'reservation = "cr-1"')
    prepare.prepare(account.file)
    account.assign("cluster.network", f'certificate = "{two}"', "private = false", 'callers = ["198.51.100.1/32"]')
    account.assign("cluster.budget", "dollars_per_month = 20")
    account.assign("cluster.iam", 'permissions_boundary = ""')
    prepare.prepare(account.file)
    account.assign("cluster.iam", f'permissions_boundary = "{BOUNDARY}"')
    prepare.prepare(account.file)
    head = account.launch(account.file.head.name)
    secrets_manager.upload(account.file)
    account.stack.status = "UPDATE_ROLLBACK_FAILED"
    prepare.prepare(account.file)
    load_balancer.register(account.file, head)
    guard.follow_head(account.file)
    assert Aws().down() == []


def test_a_caller_with_exactly_the_doctors_permissions_can_do_everything(
    account: EmulatedAccount, used: set[str]
) -> None:
    account.allow([*EVERYTHING, "acm:RequestCertificate"])
    live_with_every_option(account)
    used |= {one.action for call in account.api.calls for one in call.permissions}
    unused = EVERYTHING - used - ELSEWHERE
    assert sorted(unused) == []


@pytest.mark.parametrize("without", ["ec2:CreateVpc", "iam:CreateServiceLinkedRole", "budgets:TagResource"])
def test_without_one_of_them_prepare_fails_and_names_it(account: EmulatedAccount, without: str) -> None:
    account.allow([*EVERYTHING - {without}, "acm:RequestCertificate"])
    with pytest.raises(UserError, match=f"not authorized to perform: {without} on"):
        live_with_every_option(account)
    assert stack.find(account.file) is None


def missing(account: EmulatedAccount) -> set[str]:
    """Return the actions that the doctor finds missing."""
    finding, *_ = permissions.check(checks._sign_in(account.file))  # a warning about optional ones may follow
    return set(re.findall(r"\b[a-z][a-z0-9-]+:[A-Z]\w+", finding.text)) if finding.status == "error" else set()


def test_the_doctor_names_every_missing_action(account: EmulatedAccount) -> None:
    account.assign("cluster.network", 'certificate = "arn:aws:acm:a"', 'clients = "192.0.2.0/24"', "private = true")
    account.assign("cluster.budget", "dollars_per_month = 10", 'email = "a@example.com"')
    account.assign("cluster.iam", f'permissions_boundary = "{BOUNDARY}"')
    account.assign("cluster.capacity", 'reservation = "cr-1"')
    expected = sorted(EVERYTHING - actions_of(permissions.NO_BOUNDARY_ACTIONS))
    needed_by_doctor = {"iam:SimulatePrincipalPolicy", "iam:GetRole", "cloudformation:DescribeStacks"}
    for half in (expected[::2], expected[1::2]):
        account.allow({*EVERYTHING, *permissions.DOCTOR_ACTIONS} - set(half) | needed_by_doctor)
        assert missing(account) == set(half) - needed_by_doctor
    account.allow({*EVERYTHING, *permissions.DOCTOR_ACTIONS})
    found, without_optional = permissions.check(checks._sign_in(account.file))
    assert (found.status, without_optional.status) == ("ok", "warning")
    assert without_optional.text.startswith("without iam:ListRoles, reservations or clusters elsewhere")
    account.allow(["*"])
    assert missing(account) == set()


def test_the_role_of_load_balancers_is_needed_only_once(account: EmulatedAccount) -> None:
    account.assign("cluster.network", 'certificate = "arn:aws:acm:a"', 'clients = "192.0.2.0/24"')
    account.deny("iam:CreateServiceLinkedRole")
    assert missing(account) == {"iam:CreateServiceLinkedRole"}
    iam_backends[ACCOUNT]["aws"].create_role(
        permissions.BALANCING_ROLE, "{}", f"/aws-service-role/{permissions.BALANCING}/", None, "", [], "3600", None
    )
    assert missing(account) == set()


def require_boundary(account: EmulatedAccount) -> None:
    """Let the user create and change roles only with the boundary, as many companies do."""
    roles = ["iam:CreateRole", "iam:PutRolePolicy", "iam:DeleteRolePolicy", "iam:PutRolePermissionsBoundary"]
    statements: list[dict[str, Any]] = [
        {"Effect": "Allow", "Action": sorted({*EVERYTHING, *permissions.DOCTOR_ACTIONS} - {*roles}), "Resource": "*"},
        {
            "Effect": "Allow",
            "Action": roles,
            "Resource": "*",
            "Condition": {"StringEquals": {"iam:PermissionsBoundary": BOUNDARY}},
        },
    ]
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    iam_backends[ACCOUNT]["aws"].put_user_policy("laptop", "all", policy)


def test_a_company_may_require_a_permissions_boundary(account: EmulatedAccount) -> None:
    require_boundary(account)
    finding, *_ = permissions.check(checks._sign_in(account.file))
    assert "iam:CreateRole" in finding.text
    assert "set permissions_boundary in [cluster.iam]" in finding.text
    with pytest.raises(UserError, match="iam:CreateRole"):
        prepare.prepare(account.file)
    account.assign("cluster.iam", f'permissions_boundary = "{BOUNDARY}"')
    assert missing(account) == set()
    prepare.prepare(account.file)
    roles = [iam_backends[ACCOUNT]["aws"].get_role(account.file.role(part)) for part in ("head", "worker", "guard")]
    roles.append(iam_backends[ACCOUNT]["aws"].get_role(account.file.role("guard-caller")))
    assert {role.permissions_boundary_arn for role in roles} == {BOUNDARY}
    assert Aws().down() == []


@pytest.mark.parametrize("arn", ["limits", "arn:aws:iam::123456789012:role/limits"])
def test_a_boundary_is_the_arn_of_a_policy(account: EmulatedAccount, arn: str) -> None:
    account.assign("cluster.iam", f'permissions_boundary = "{arn}"')
    with pytest.raises(UserError, match="permissions_boundary"):
        prepare.prepare(account.file)
