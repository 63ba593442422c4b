"""Test the doctor for AWS with stubbed answers. botocore validates calls and answers with its models of AWS's APIs."""

import functools
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import botocore
import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError
from botocore.stub import Stubber

from raymill import settings
from raymill.aws import quotas, stack
from raymill.aws.doctor import checks, laptop, permissions
from raymill.common import cluster_file
from raymill.common.cluster_file import ClusterFile
from raymill.doctor import Finding
from raymill.instance_types import INSTANCE_TYPES

USER = "arn:aws:iam::123456789012:user/ada"
PARAMETER = "/aws/service/deeplearning/latest/ami-id"
VCPUS = {"m6i.2xlarge": 8, "m6i.8xlarge": 32} | {name: one.vcpus for name, one in INSTANCE_TYPES.items()}
ZONES = ["us-east-1a", "us-east-1b"]
READ_ONLY = {
    *("DescribeCapacityReservations", "DescribeImages", "DescribeInstanceTypeOfferings", "DescribeInstanceTypes"),
    *("DescribeInstances", "DescribeKeyPairs"),
    *("DescribeRouteTables", "DescribeSecret", "DescribeSpotPriceHistory", "DescribeStacks", "DescribeSubnets"),
    *("DescribeVolumes", "DescribeVpcs", "HeadBucket"),
    *("GetCallerIdentity", "GetEbsDefaultKmsKeyId", "GetParameters", "GetProducts", "GetRole", "GetServiceQuota"),
    "SimulatePrincipalPolicy",
}
SERVICES = ("ec2", "iam", "cloudformation", "pricing", "secretsmanager", "elbv2")
# One action per resource type in stack.yaml. Add each new type here, and its actions to permissions.py.
CREATE_ACTIONS = {
    "AWS::EC2::SecurityGroup": "ec2:CreateSecurityGroup",
    "AWS::EC2::SecurityGroupIngress": "ec2:AuthorizeSecurityGroupIngress",
    "AWS::EC2::SecurityGroupEgress": "ec2:AuthorizeSecurityGroupEgress",
    "AWS::EC2::VPC": "ec2:CreateVpc",
    "AWS::EC2::Subnet": "ec2:CreateSubnet",
    "AWS::EC2::InternetGateway": "ec2:CreateInternetGateway",
    "AWS::EC2::VPCGatewayAttachment": "ec2:AttachInternetGateway",
    "AWS::EC2::RouteTable": "ec2:CreateRouteTable",
    "AWS::EC2::Route": "ec2:CreateRoute",
    "AWS::EC2::SubnetRouteTableAssociation": "ec2:AssociateRouteTable",
    "AWS::EC2::VPCEndpoint": "ec2:CreateVpcEndpoint",
    "AWS::EC2::EIP": "ec2:AllocateAddress",
    "AWS::EC2::NatGateway": "ec2:CreateNatGateway",
    "AWS::EC2::PlacementGroup": "ec2:CreatePlacementGroup",
    "AWS::EC2::LaunchTemplate": "ec2:CreateLaunchTemplate",
    "AWS::S3::Bucket": "s3:CreateBucket",
    "AWS::IAM::Role": "iam:CreateRole",
    "AWS::IAM::InstanceProfile": "iam:CreateInstanceProfile",
    "AWS::IAM::Policy": "iam:PutRolePolicy",
    "AWS::Budgets::Budget": "budgets:ModifyBudget",
    "AWS::Lambda::Function": "lambda:CreateFunction",
    "AWS::ElasticLoadBalancingV2::LoadBalancer": "elasticloadbalancing:CreateLoadBalancer",
    "AWS::ElasticLoadBalancingV2::TargetGroup": "elasticloadbalancing:CreateTargetGroup",
    "AWS::ElasticLoadBalancingV2::Listener": "elasticloadbalancing:CreateListener",
}
OPTIONAL = (
    permissions.BUCKET_ACTIONS,
    permissions.VPC_ACTIONS,
    permissions.NAT_ACTIONS,
    permissions.HTTPS_ACTIONS,
    permissions.BUDGET_ACTIONS,
    permissions.RESERVATION_ACTIONS,
    permissions.OPTIONAL_ACTIONS,
)
ALL_ACTIONS = {*permissions.UP_AND_DOWN, *" ".join(text for one in OPTIONAL for text in one.values()).split()}


class ErrorAnswer(NamedTuple):
    """An error that AWS returns."""

    code: str
    message: str = ""


Answer = dict[str, Any] | ErrorAnswer | Exception


class StubbedAws:
    """Answers each call with the entry of `answers` for the operation, and records the calls."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | Callable[[dict[str, Any]], Answer]] = {
            "GetCallerIdentity": {"Arn": USER, "Account": "123456789012"},
            "SimulatePrincipalPolicy": lambda asked: simulated(asked["ActionNames"]),
            "GetServiceQuota": lambda asked: quota(asked["QuotaCode"], 1000),
            "DescribeInstances": {"Reservations": []},
            "DescribeKeyPairs": {"KeyPairs": []},
            "DescribeInstanceTypes": lambda asked: {"InstanceTypes": list(map(described, asked["InstanceTypes"]))},
            "DescribeInstanceTypeOfferings": lambda asked: offers(asked["Filters"][0]["Values"]),
            "DescribeCapacityReservations": {"CapacityReservations": []},
            "DescribeVolumes": {"Volumes": []},
            "DescribeVpcs": {"Vpcs": [{"VpcId": "vpc-1"}]},
            "DescribeStacks": ErrorAnswer("ValidationError", "Stack with id my-llm does not exist"),
            "DescribeRouteTables": routes(GatewayId="igw-1"),
            "DescribeSubnets": subnets(250),
            "GetParameters": {"Parameters": [{"Name": PARAMETER, "Value": "ami-1"}]},
            "DescribeImages": lambda asked: image(asked["Filters"][0]["Values"][0]),
            "GetEbsDefaultKmsKeyId": {"KmsKeyId": "alias/aws/ebs"},
            "DescribeSecret": {"Name": "there"},
            "GetRole": lambda asked: role(asked["RoleName"]),
            "GetProducts": {"PriceList": [json.dumps(PRODUCT)]},
            "DescribeSpotPriceHistory": lambda asked: {"SpotPriceHistory": spot_prices(asked["InstanceTypes"])},
            "RunInstances": ErrorAnswer("DryRunOperation"),
            "TerminateInstances": ErrorAnswer("DryRunOperation"),
        }
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def client(self, service: str, region_name: str) -> Any:
        """Return a stubbed boto3 client. It sends nothing, and rejects calls that do not match the model of the API."""
        client, stubber, send = stubbed(service, region_name)
        lock = threading.Lock()

        def call(operation: str, parameters: dict[str, Any]) -> Any:
            self.asked.append((operation, parameters))
            answer = self.answers[operation]
            answer = answer(parameters) if callable(answer) else answer
            if isinstance(answer, Exception):
                raise answer
            with lock:  # a stubber returns answers in the order in which they were added
                method = botocore.xform_name(operation)
                if isinstance(answer, ErrorAnswer):
                    stubber.add_client_error(method, answer.code, answer.message)
                else:
                    stubber.add_response(method, answer)
                return send(operation, parameters)

        client._make_api_call = call
        return client


@functools.cache  # creating a client is slow
def stubbed(service: Any, region: str) -> tuple[Any, Stubber, Callable[..., Any]]:
    """Return a client, its stubber, and the method that makes the client's calls."""
    client = SESSION.client(service, region_name=region)
    stubber = Stubber(client)
    stubber.activate()
    return client, stubber, client._make_api_call


SESSION = boto3.session.Session(aws_access_key_id="none", aws_secret_access_key="none")
PRODUCT = {"terms": {"OnDemand": {"term": {"priceDimensions": {"it": {"pricePerUnit": {"USD": "2.0"}}}}}}}


def simulated(actions: list[str], *denied: str) -> Answer:
    decisions = {action: "implicitDeny" if action in denied else "allowed" for action in actions}
    return {
        "EvaluationResults": [
            {"EvalActionName": name, "EvalDecision": decision} for name, decision in decisions.items()
        ]
    }


def quota(code: str, vcpus: float) -> Answer:
    return {"Quota": {"QuotaCode": code, "QuotaName": "Running machines", "Value": float(vcpus)}}


def described(instance_type: str) -> dict[str, Any]:
    one = INSTANCE_TYPES.get(instance_type)
    gpus = {"GpuInfo": {"Gpus": [{"Name": one.gpu.accelerator, "Count": one.gpus}]}} if one else {}
    return {"InstanceType": instance_type, "VCpuInfo": {"DefaultVCpus": VCPUS[instance_type]}} | gpus


def offers(types: list[str]) -> Answer:
    return {"InstanceTypeOfferings": [{"InstanceType": one, "Location": zone} for one in types for zone in ZONES]}


def spot_prices(types: list[str]) -> list[dict[str, str]]:
    return [
        {"InstanceType": one, "AvailabilityZone": zone, "SpotPrice": f"{10 + index}.0"}
        for one in types
        for index, zone in enumerate(ZONES)
    ]


def image(name: str, created: str = "2026-11-01T00:00:00.000Z") -> Answer:
    return {"Images": [{"ImageId": name, "CreationDate": created}]}


def subnets(free: int) -> Answer:
    return {
        "Subnets": [
            {
                **{"SubnetId": f"subnet-{zone}", "VpcId": "vpc-1"},
                **{"AvailabilityZone": zone, "AvailableIpAddressCount": free},
            }
            for zone in ZONES
        ]
    }


def routes(**gateway: str) -> Answer:
    """Return a route table that sends internet traffic to the gateway, or nowhere."""
    default = [{"DestinationCidrBlock": "0.0.0.0/0", **gateway}] if gateway else []
    return {"RouteTables": [{"Routes": [{"DestinationCidrBlock": "10.0.0.0/16", "GatewayId": "local"}, *default]}]}


def role(name: str, path: str = "/") -> Answer:
    arn = f"arn:aws:iam::123456789012:role{path}{name}"
    return {"Role": {"Path": path, "RoleName": name, "RoleId": "A" * 16, "Arn": arn, "CreateDate": "2026-01-01"}}


def instance(**more: Any) -> Callable[[dict[str, Any]], Answer]:
    """Return a function that answers DescribeInstances with one running instance."""
    known = {
        "InstanceId": "i-1",
        "InstanceType": "p4d.24xlarge",
        "ImageId": "ami-1",
        "Placement": {"AvailabilityZone": ZONES[0]},
        "State": {"Name": "running"},
        "LaunchTime": "2026-01-01",
    }
    found = [{"Instances": [known | more]}]
    return lambda asked: {"Reservations": found if "running" in asked["Filters"][-1]["Values"] else []}


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> StubbedAws:
    """Replace all boto3 clients, including those that are not created through the cluster file."""
    cloud = StubbedAws()
    monkeypatch.setattr(boto3, "client", cloud.client)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", boto3.DEFAULT_SESSION)  # so that pytest undoes the doctor's change
    return cloud


def node_config(instance_type: str) -> dict[str, Any]:
    tags = {"ResourceType": "instance", "Tags": [{"Key": "ray-project", "Value": "my-llm"}]}
    return {"InstanceType": instance_type, "ImageId": f"resolve:ssm:{PARAMETER}", "TagSpecifications": [tags]}


@pytest.fixture
def file() -> ClusterFile:
    def node_type(instance_type: str, most: int = 2, **more: Any) -> dict[str, Any]:
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 500, "VolumeType": "gp3"}}
        config = node_config(instance_type) | {"BlockDeviceMappings": [disk]} | more
        return {"max_workers": most, "node_config": config}

    node_types = {
        "head": node_type("m6i.2xlarge", 1),
        "cpu": node_type("m6i.8xlarge"),
        "spot-1": node_type("p4d.24xlarge", InstanceMarketOptions={"MarketType": "spot"}),
        "spot-2": node_type("p4d.24xlarge", InstanceMarketOptions={"MarketType": "spot"}),
        "on-demand": node_type("p4d.24xlarge"),
    }
    content = {
        "cluster_name": "my-llm",
        "max_workers": 2,
        "provider": {"region": "us-east-1"},
        "head_node_type": "head",
        "available_node_types": node_types,
        "setup_commands": ["uv venv --clear --python 3.11 ~/env"],
    }
    return ClusterFile(content, "digest")


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that sets a key in a section of settings.toml. The tests change a copy of the file."""
    copy = Path(shutil.copy(settings.FILE, tmp_path))
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": copy})
    monkeypatch.setattr(settings, "FILE", copy)

    def assign(section: str, assignment: str) -> None:
        found = re.split(rf"(^\[{re.escape(section)}\].*\n)", copy.read_text(encoding="utf-8"), flags=re.MULTILINE)
        before, header, after = found if len(found) == 3 else ("\n".join(found), f"[{section}]\n", "")
        own, mark, rest = after.partition("\n[")
        key = assignment.partition(" = ")[0]
        own = re.sub(rf"^{key} = .*\n?", "", own, flags=re.MULTILINE)
        copy.write_text(f"{before}{header}{assignment}\n{own}{mark}{rest}", encoding="utf-8")

    return assign


def texts(findings: list[Finding], status: str) -> list[str]:
    return [finding.text for finding in findings if finding.status == status]


def only(file: ClusterFile, status: str) -> str:
    """Return the text of the only finding that is not ok, which must have this status."""
    findings = checks.check(file)
    (text,) = texts(findings, status)
    assert {finding.status for finding in findings} == {"ok", status}
    return text


def test_a_sound_account_and_project_are_ok(cloud: StubbedAws, file: ClusterFile) -> None:
    findings = checks.check(file)
    assert texts(findings, "error") == texts(findings, "warning") == []
    report = "\n".join(texts(findings, "ok"))
    for part in (
        f"signed in to AWS as {USER}",
        "(L-7A658B76): 1.5 TiB needed, 1000 granted, 0.0 used by other disks",
        "(L-417A185B): 192 vCPUs needed, 1000 granted, 0 used by other instances",
        "(L-7212CCBC): 192 vCPUs needed",
        "(L-1216C47A): 72 vCPUs needed",
        "p4d.24xlarge is offered in us-east-1a, us-east-1b",
        "the stack makes a VPC with subnets in us-east-1a, us-east-1b",
        "1 of at most 1000 VPCs in us-east-1",
        "is ami-1 in us-east-1",
        "the secret my-llm/SERVE_API_KEY is in Secrets Manager",
        "2.00 dollars per hour while idle",
        "528 dollars per day with all 2 workers",  # per hour: 2 dollars for the head, and 10 for each of two workers
    ):
        assert part in report


def test_without_credentials_the_local_checks_still_run(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetCallerIdentity"] = NoCredentialsError()
    text = only(file, "error")
    assert "aws configure" in text
    assert "AWS_ACCESS_KEY_ID" in text
    assert "Not checked: permissions, quotas," in text
    assert [operation for operation, _ in cloud.asked] == ["GetCallerIdentity"]


def test_expired_credentials_are_reported(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetCallerIdentity"] = ErrorAnswer("ExpiredToken", "The security token included is expired")
    assert re.search(r"is expired.*aws sso login", only(file, "error"))


def test_no_network_is_not_blamed_on_credentials(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetCallerIdentity"] = EndpointConnectionError(endpoint_url="https://sts")
    text = only(file, "error")
    assert "HTTPS_PROXY" in text
    assert "aws configure" not in text


@pytest.mark.parametrize(
    ("operation", "code", "message", "action"),
    [
        ("DescribeSecret", "AccessDeniedException", f"User: {USER} is not authorized to perform: a:B on x", "a:B"),
        ("GetServiceQuota", "AccessDeniedException", "no", "servicequotas:GetServiceQuota"),
        ("DescribeVpcs", "UnauthorizedOperation", "You are not authorized to do this.", "ec2:DescribeVpcs"),
        ("GetProducts", "AccessDeniedException", "no", "pricing:GetProducts"),
        ("GetParameters", "AccessDeniedException", "no", "ssm:GetParameters"),
    ],
)
def test_a_denied_call_names_its_action(
    cloud: StubbedAws, file: ClusterFile, operation: str, code: str, message: str, action: str
) -> None:
    cloud.answers[operation] = ErrorAnswer(code, message)
    assert f"Ask for the permission {action}. " in only(file, "error")


def test_another_error_is_a_warning_without_a_traceback(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetServiceQuota"] = ErrorAnswer("TooManyRequestsException", "slow down")
    assert re.fullmatch(
        r"quotas L-417A185B, L-7212CCBC, L-1216C47A, L-7A658B76, L-F678F1CE: not checked, because AWS says: .*slow down"
        r"\. Run again: inv doctor.*",
        only(file, "warning"),
    )


@pytest.mark.parametrize("code", ["L-417A185B", "L-1216C47A", "L-7A658B76", "L-F678F1CE"])
def test_an_unknown_quota_does_not_hide_the_others(cloud: StubbedAws, file: ClusterFile, code: str) -> None:
    unknown = ErrorAnswer("NoSuchResourceException", "no such quota")
    cloud.answers["GetServiceQuota"] = lambda asked: unknown if asked["QuotaCode"] == code else quota("L-1", 0)
    findings = checks.check(file)
    assert f"quotas {code}: not checked, because AWS says: " in "".join(texts(findings, "warning"))
    others = {"L-417A185B", "L-7212CCBC", "L-1216C47A", "L-7A658B76", "L-F678F1CE"} - {code}
    too_small = "\n".join(text for text in texts(findings, "error") + texts(findings, "warning") if "increase" in text)
    assert {one for one in others if f"--quota-code {one} " in too_small} == others


def test_the_page_about_the_first_run_asks_for_enough_standard_instances(cloud: StubbedAws) -> None:
    """The first quota that stops a new account is not one for GPUs."""
    cloud.answers["GetServiceQuota"] = lambda asked: quota(asked["QuotaCode"], 0)
    found = "".join(texts(checks.check(cluster_file.load()), "error"))
    (needed,) = re.findall(r"\(L-1216C47A\): (\d+) vCPUs needed", found)
    page = (settings.PROJECT / "docs" / "first-run.md").read_text(encoding="utf-8")
    assert f"--quota-code L-1216C47A --desired-value {needed}\n" in page
    assert f"the project needs {needed}" in page
    assert f"for GPUs and {needed} other vCPUs" in (settings.PROJECT / "README.md").read_text(encoding="utf-8")


def test_missing_permissions_are_named(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["SimulatePrincipalPolicy"] = lambda asked: simulated(
        asked["ActionNames"], "iam:PassRole", "ec2:RunInstances"
    )
    assert only(file, "error").endswith(f"Add the others to the policy of {USER}: ec2:RunInstances, iam:PassRole")
    asked = [parameters for operation, parameters in cloud.asked if operation == "SimulatePrincipalPolicy"]
    resources = {action: call["ResourceArns"] for call in asked for action in call["ActionNames"]}
    assert resources["iam:CreateRole"] == ["arn:aws:iam::123456789012:role/my-llm-us-east-1-head"]
    passed = {
        call["ResourceArns"][0].rpartition("us-east-1-")[2]: entry["ContextKeyValues"][0]
        for call in asked
        for entry in call["ContextEntries"]
        if "iam:PassRole" in call["ActionNames"] and entry["ContextKeyName"] == "iam:PassedToService"
    }
    services = ("ec2.amazonaws.com", "lambda.amazonaws.com", "scheduler.amazonaws.com")
    assert passed == dict(zip(("head", "guard", "guard-caller"), services, strict=True))
    assert resources["s3:CreateBucket"] == ["arn:aws:s3:::my-llm-123456789012-us-east-1"]
    assert {call["PolicySourceArn"] for call in asked} == {USER}


def test_the_policies_of_a_role_are_simulated_by_its_full_path(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetCallerIdentity"] = {
        "Arn": "arn:aws:sts::123456789012:assumed-role/admin/ada",
        "Account": "123456789012",
    }
    cloud.answers["GetRole"] = lambda asked: role(asked["RoleName"], "/sso/")
    assert texts(checks.check(file), "error") == []
    (source,) = {call["PolicySourceArn"] for name, call in cloud.asked if name == "SimulatePrincipalPolicy"}
    assert source == "arn:aws:iam::123456789012:role/sso/admin"


def test_the_root_user_gets_a_warning(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetCallerIdentity"] = {"Arn": "arn:aws:iam::123456789012:root"}
    assert "aws iam create-user" in only(file, "warning")


def test_without_simulation_permissions_are_checked_with_dry_runs(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["SimulatePrincipalPolicy"] = ErrorAnswer("AccessDenied", "no")
    text = only(file, "warning")
    used = (permissions.BUCKET_ACTIONS, permissions.VPC_ACTIONS)
    needed = len(permissions.UP_AND_DOWN) + sum(len(text.split()) for one in used for text in one.values())
    assert f"{needed - 1} other actions of inv up and inv down are not checked" in text
    assert "iam:SimulatePrincipalPolicy" in text
    assert "you have the permission ec2:RunInstances" in texts(checks.check(file), "ok")


def test_without_simulation_a_denied_dry_run_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["SimulatePrincipalPolicy"] = ErrorAnswer("AccessDenied", "no")
    cloud.answers["RunInstances"] = ErrorAnswer("UnauthorizedOperation", "no")
    cloud.answers["TerminateInstances"] = ErrorAnswer("InvalidInstanceID.NotFound", "gone")
    cloud.answers["DescribeInstances"] = instance()
    findings = checks.check(file)
    assert texts(findings, "error") == [f"you lack the permission ec2:RunInstances. Add it to the policy of {USER}"]
    assert any("the permission ec2:TerminateInstances is not checked" in text for text in texts(findings, "warning"))


def test_the_doctor_only_reads(cloud: StubbedAws, file: ClusterFile) -> None:
    checks.check(file)
    cloud.answers["SimulatePrincipalPolicy"] = ErrorAnswer("AccessDenied", "no")
    cloud.answers["DescribeInstances"] = instance()
    checks.check(file)
    writing = [(name, asked.get("DryRun")) for name, asked in cloud.asked if name not in READ_ONLY]
    assert sorted(set(writing)) == [("RunInstances", True), ("TerminateInstances", True)]


def test_a_quota_of_zero_in_one_market_is_a_warning_that_names_the_other(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetServiceQuota"] = without("L-7212CCBC")
    text = only(file, "warning")
    assert "192 vCPUs needed, 0 granted, 0 used by other instances. " in text
    assert "Until you have more, only p4d.24xlarge on-demand instances can start. Request an increase" in text
    assert text.endswith(
        "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code L-7212CCBC "
        "--desired-value 192 --region us-east-1"
    )


def without(*codes: str) -> Callable[[dict[str, Any]], Answer]:
    """Return a function that answers GetServiceQuota: no vCPUs in these quotas, and 1000 in the others."""
    return lambda asked: quota(asked["QuotaCode"], 0 if asked["QuotaCode"] in codes else 1000)


def test_a_quota_of_zero_in_every_market_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetServiceQuota"] = without("L-7212CCBC", "L-417A185B")
    findings = checks.check(file)
    found = texts(findings, "error")
    assert len(found) == 2
    assert texts(findings, "warning") == []
    assert all("0 granted" in text and "only" not in text for text in found)


def test_another_instance_type_may_replace_one_without_quota(cloud: StubbedAws, file: ClusterFile) -> None:
    file.content["available_node_types"]["other"] = {
        "max_workers": 2,
        "node_config": node_config("g6e.12xlarge"),
    }
    cloud.answers["GetServiceQuota"] = without("L-7212CCBC", "L-417A185B")
    findings = checks.check(file)
    assert texts(findings, "error") == []
    found = texts(findings, "warning")
    assert len(found) == 2
    assert all("only g6e.12xlarge on-demand instances can start" in text for text in found)


def test_a_quota_may_be_large_enough_for_only_some_types(cloud: StubbedAws, file: ClusterFile) -> None:
    file.content["available_node_types"]["other"] = {
        "max_workers": 2,
        "node_config": node_config("p5.48xlarge"),
    }
    cloud.answers["GetServiceQuota"] = lambda asked: quota(
        asked["QuotaCode"], {"L-417A185B": 100, "L-7212CCBC": 0}.get(asked["QuotaCode"], 1000)
    )
    findings = checks.check(file)
    assert texts(findings, "error") == []
    assert all("only p4d.24xlarge on-demand instances can start" in text for text in texts(findings, "warning"))


def test_a_quota_that_is_too_small_for_serving_is_an_error_although_training_can_start(
    cloud: StubbedAws, file: ClusterFile
) -> None:
    for name in ("spot-1", "spot-2", "on-demand"):
        file.content["available_node_types"][name]["labels"] = {"zone": "1"}
    file.content["available_node_types"]["serve"] = {
        "max_workers": 2,
        "node_config": node_config("g6e.12xlarge"),
    }
    cloud.answers["GetServiceQuota"] = without("L-DB2E81BA")
    assert "(L-DB2E81BA): 96 vCPUs needed, 0 granted" in only(file, "error")


def test_each_type_of_the_table_has_its_quotas() -> None:
    for name, one in INSTANCE_TYPES.items():
        for market, code in (("on-demand", one.family.on_demand_quota), ("spot", one.family.spot_quota)):
            found = quotas.of(name, market)
            assert (found.code if found else "") == code


def test_other_instances_count_against_the_quota_of_their_market(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetServiceQuota"] = lambda asked: quota(asked["QuotaCode"], 192)
    cloud.answers["DescribeInstances"] = instance(InstanceLifecycle="spot")
    text = only(file, "warning")  # only a warning, because there is room for one of two instances
    assert "(L-7212CCBC): 192 vCPUs needed, 192 granted, 96 used by other instances" in text
    assert "--desired-value 288 " in text


def test_the_clusters_own_instances_do_not_count_twice(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetServiceQuota"] = lambda asked: quota(asked["QuotaCode"], 192)
    cloud.answers["DescribeInstances"] = instance(Tags=[{"Key": "ray-project", "Value": "my-llm"}])
    assert texts(checks.check(file), "warning") == []


@pytest.mark.parametrize(
    ("granted", "others", "own", "status"),
    [
        (2, 100, 0, "ok"),
        (2, 700, 0, "warning"),  # room for the head and one worker
        (2, 1100, 0, "error"),
        (2, 0, 1500, "ok"),  # the cluster's own disks count only once
        (1, 0, 0, "warning"),
    ],
)
def test_all_disks_fit_into_the_quota(
    cloud: StubbedAws, file: ClusterFile, granted: int, others: int, own: int, status: str
) -> None:
    tags = [{"Key": "ray-project", "Value": file.slug}]
    volumes = [{"VolumeId": "vol-1", "Size": others}, {"VolumeId": "vol-2", "Size": own, "Tags": tags}]
    cloud.answers["DescribeVolumes"] = {"Volumes": volumes}
    sizes = {"L-7A658B76": granted}
    cloud.answers["GetServiceQuota"] = lambda asked: quota(asked["QuotaCode"], sizes.get(asked["QuotaCode"], 1000))
    (found,) = [one for one in checks.check(file) if "L-7A658B76" in one.text]
    assert found.status == status
    assert f"1.5 TiB needed, {granted} granted" in found.text
    needed = -(-(1500 + others) // 1024)
    request = f"--service-code ebs --quota-code L-7A658B76 --desired-value {needed} "
    assert (request in found.text) == (status != "ok")


def test_a_section_that_nothing_reads_is_an_error(
    cloud: StubbedAws, file: ClusterFile, tune: Callable[[str, str], None]
) -> None:
    tune("cluster.netwrok", "private = true")
    assert "there is no section [cluster.netwrok]. Did you mean [cluster.network]?" in only(file, "error")


def test_a_missing_spot_role_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetRole"] = ErrorAnswer("NoSuchEntity", "no")
    assert "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com" in only(file, "error")


def test_an_instance_type_that_the_region_does_not_offer_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["DescribeInstanceTypeOfferings"] = lambda asked: offers(
        [one for one in asked["Filters"][0]["Values"] if one != "m6i.8xlarge"]
    )
    assert only(file, "error") == (
        "m6i.8xlarge is offered in no zone of us-east-1. Set another InstanceType or region in cluster/cluster.yaml"
    )


def except_in(*pairs: tuple[str, str]) -> Callable[[dict[str, Any]], Answer]:
    """Return a function that answers DescribeInstanceTypeOfferings: all types in all zones but these."""

    def answer(asked: dict[str, Any]) -> Answer:
        found = offers(asked["Filters"][0]["Values"])["InstanceTypeOfferings"]  # type: ignore[index,call-overload]
        return {"InstanceTypeOfferings": [one for one in found if (one["InstanceType"], one["Location"]) not in pairs]}

    return answer


def test_the_head_may_need_another_zone_than_the_gpus(cloud: StubbedAws, file: ClusterFile) -> None:
    for name in ("spot-1", "spot-2", "on-demand"):
        file.content["available_node_types"][name]["labels"] = {"zone": "2" if name == "spot-2" else "1"}
    cloud.answers["DescribeInstanceTypeOfferings"] = except_in(("m6i.2xlarge", ZONES[0]))
    assert f"the stack makes a VPC with subnets in {ZONES[1]}, {ZONES[0]}" in texts(checks.check(file), "ok")
    cloud.answers["DescribeInstanceTypeOfferings"] = except_in(("m6i.2xlarge", ZONES[0]), ("p4d.24xlarge", ZONES[1]))
    text = only(file, "warning")
    assert text.startswith("the head and CPU workers start in us-east-1b, which does not offer p4d.24xlarge. AWS ch")
    cloud.answers["DescribeInstanceTypeOfferings"] = except_in(("m6i.2xlarge", ZONES[0]), ("m6i.8xlarge", ZONES[1]))
    text = only(file, "error")
    assert text.startswith("m6i.2xlarge (head) would start in us-east-1a, but only us-east-1b offer it. Set another")


def test_a_type_that_keeps_the_others_from_efa_is_a_warning(
    cloud: StubbedAws, file: ClusterFile, tune: Callable[[str, str], None]
) -> None:
    tune("cluster.gpu", 'instance_types = ["p5.48xlarge", "g6.xlarge"]')
    assert "g6.xlarge has no EFA, so p5.48xlarge does not use it either" in "\n".join(
        texts(checks.check(file), "warning")
    )
    tune("cluster.network", "efa = false")
    assert "has no EFA" not in "\n".join(texts(checks.check(file), "warning"))


@pytest.fixture
def own_subnets(tune: Callable[[str, str], None]) -> None:
    """Name subnets in settings.toml."""
    tune("cluster.network", f"subnets = {[f'subnet-{zone}' for zone in ZONES]}")


@pytest.mark.usefixtures("own_subnets")
def test_public_subnets_of_the_user_are_ok(cloud: StubbedAws, file: ClusterFile) -> None:
    report = "\n".join(texts(checks.check(file), "ok"))
    assert "subnet-us-east-1b in us-east-1b: 250 addresses free, up to 3 needed" in report
    assert "subnet subnet-us-east-1a: internet traffic goes to igw-1" in report
    assert "CreateVpc" not in str(cloud.asked)


@pytest.mark.usefixtures("own_subnets")
def test_a_full_subnet_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["DescribeSubnets"] = subnets(2)
    found = texts(checks.check(file), "error")
    assert len(found) == len(ZONES)
    assert "2 addresses free, up to 3 needed" in found[0]
    assert "aws ec2 create-subnet --vpc-id vpc-1 --availability-zone us-east-1a" in found[0]


@pytest.mark.parametrize("gateway", [{}, {"NatGatewayId": "nat-1"}])
@pytest.mark.usefixtures("own_subnets")
def test_a_subnet_without_a_public_route_is_an_error(
    cloud: StubbedAws, file: ClusterFile, gateway: dict[str, str]
) -> None:
    """The head would start there, and `ray up` would wait 15 minutes for ssh."""
    cloud.answers["DescribeRouteTables"] = routes(**gateway)
    found = texts(checks.check(file), "error")
    assert len(found) == len(ZONES)
    assert f"internet traffic goes to {gateway.get('NatGatewayId', 'nowhere')}" in found[0]
    assert "It must be a public subnet" in found[0]


def test_no_room_for_a_vpc_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["DescribeVpcs"] = {"Vpcs": [{"VpcId": f"vpc-{number}"} for number in range(1000)]}
    assert "--quota-code L-F678F1CE --desired-value 1001" in only(file, "error")


def test_the_clusters_own_vpc_needs_no_more_room(cloud: StubbedAws, file: ClusterFile) -> None:
    own = {"Tags": [{"Key": "ray-project", "Value": file.slug}]}
    cloud.answers["DescribeVpcs"] = {"Vpcs": [{"VpcId": f"vpc-{number}"} | own for number in range(1000)]}
    assert texts(checks.check(file), "error") == []


def test_an_image_that_does_not_exist_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetParameters"] = {"Parameters": [], "InvalidParameters": [PARAMETER]}
    assert "aws ssm get-parameters-by-path" in only(file, "error")
    for node_type in file.content["available_node_types"].values():
        node_type["node_config"]["ImageId"] = "ami-7"
    assert texts(checks.check(file), "error") == []
    cloud.answers["DescribeImages"] = {"Images": []}
    assert "ImageId ami-7 is not an image in us-east-1" in only(file, "error")


def test_an_image_that_is_older_than_the_driver_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["DescribeImages"] = image("ami-1", "2025-07-31T00:00:00.000Z")
    assert "image ami-1 is from 2025-07-31, before NVIDIA's driver 580, which CUDA 13 needs. Set" in only(file, "error")


def test_a_bucket_that_the_cluster_cannot_use_is_an_error(
    cloud: StubbedAws, file: ClusterFile, tune: Callable[[str, str], None]
) -> None:
    tune("cluster.storage", 'bucket = "our-work"')
    cloud.answers["HeadBucket"] = {"BucketRegion": "us-east-1"}
    assert "your bucket our-work is in us-east-1" in texts(checks.check(file), "ok")
    asked = [parameters for operation, parameters in cloud.asked if operation == "SimulatePrincipalPolicy"]
    about_bucket = [call["ActionNames"] for call in asked if call["ResourceArns"] == ["arn:aws:s3:::our-work"]]
    assert about_bucket == [["s3:ListBucket"]]
    cloud.answers["HeadBucket"] = {"BucketRegion": "eu-west-1"}
    assert "our-work in [cluster.storage] of settings.toml is in eu-west-1, but" in only(file, "error")
    cloud.answers["HeadBucket"] = ErrorAnswer("404")
    assert "Run: aws s3 mb s3://our-work --region us-east-1" in only(file, "error")
    cloud.answers["HeadBucket"] = ErrorAnswer("403")
    assert "does not admit you. Ask its owner for access" in only(file, "error")


def test_a_key_for_disks_that_the_caller_cannot_use_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/1"
    cloud.answers["GetEbsDefaultKmsKeyId"] = {"KmsKeyId": key}
    cloud.answers["DescribeKey"] = {"KeyMetadata": {"KeyId": "1", "KeyState": "Enabled"}}
    assert texts(checks.check(file), "error") == []
    cloud.answers["DescribeKey"] = {"KeyMetadata": {"KeyId": "1", "KeyState": "PendingDeletion"}}
    assert f"your account encrypts disks with {key}, in state PendingDeletion. Show the key" in only(file, "error")
    cloud.answers["DescribeKey"] = ErrorAnswer("AccessDeniedException", "no")
    assert "Ask for the permissions kms:CreateGrant kms:Decrypt" in only(file, "error")


def test_secrets_without_a_value_get_a_warning(
    cloud: StubbedAws, file: ClusterFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.answers["DescribeSecret"] = ErrorAnswer("ResourceNotFoundException", "no")
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    findings = checks.check(file)
    assert "the secret my-llm/SERVE_API_KEY will be stored by inv up" in texts(findings, "ok")
    assert texts(findings, "warning") == [
        "the secret my-llm/SERVE_API_KEYS has no value, so jobs run without it. Put SERVE_API_KEYS=... into .env",
        "the secret my-llm/HF_TOKEN has no value, so jobs run without it. Put HF_TOKEN=... into .env",
    ]
    (tmp_path / ".env").write_text("HF_TOKEN=canary\n")
    findings = checks.check(file)
    assert "the secret my-llm/HF_TOKEN will be stored by inv up" in texts(findings, "ok")
    assert "canary" not in str(findings)


def test_a_secret_that_is_being_deleted_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["DescribeSecret"] = lambda asked: {"DeletedDate": "2026-01-01"} if "HF" in asked["SecretId"] else {}
    assert only(file, "error").endswith("restore-secret --secret-id my-llm/HF_TOKEN --region us-east-1")


def test_an_instance_type_without_a_price_is_an_error(cloud: StubbedAws, file: ClusterFile) -> None:
    cloud.answers["GetProducts"] = {"PriceList": []}
    assert "AWS has no price for" in only(file, "error")


def test_more_workers_than_the_cluster_can_have_are_an_error(
    cloud: StubbedAws, file: ClusterFile, tune: Callable[[str, str], None]
) -> None:
    tune("cluster.train", "num_workers = 17")
    assert "more than the 16 that this cluster can hold; use --num-workers 16" in only(file, "error")


def test_more_replicas_than_the_cluster_can_have_are_reported(
    cloud: StubbedAws, file: ClusterFile, tune: Callable[[str, str], None]
) -> None:
    tune("cluster.serve", "max_replicas = 17")
    assert "max_replicas = 17 needs 17 GPUs, and the cluster can have 16. Lower max_replicas" in only(file, "warning")
    tune("cluster.serve", "tensor_parallel_size = 32")
    assert "needs 544 GPUs, and the cluster can have 16" in only(file, "error")


def test_a_path_on_one_node_is_an_error(cloud: StubbedAws, file: ClusterFile, tune: Callable[[str, str], None]) -> None:
    tune("cluster.train", 'data = "/home/me/packed"')
    text = only(file, "error")
    assert "data = /home/me/packed is on the disk of one node" in text
    assert "to shared_paths in [train]" in text


def test_a_path_in_mix_on_one_node_is_an_error(
    cloud: StubbedAws, file: ClusterFile, tune: Callable[[str, str], None]
) -> None:
    tune("cluster.preprocess", 'mix = ["faq.jsonl=2", "/home/me/chats.jsonl=0.5"]')
    assert "mix = /home/me/chats.jsonl is on the disk of one node" in only(file, "error")


def test_another_ray_or_python_than_on_the_cluster_is_an_error(
    cloud: StubbedAws, file: ClusterFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cluster.txt").write_text("ray[llm]==1.2.3\n")
    monkeypatch.setattr(laptop, "PINS", tmp_path / "cluster.txt")
    file.content["setup_commands"] = ["~/.local/bin/uv venv --clear --python 3.9 ~/env"]
    ray, python = texts(checks.check(file), "error")
    assert re.match(r"Ray: .* here, 1\.2\.3 on the cluster\. .* rm -r \.venv", ray)
    assert "3.9 on the cluster" in python


def test_a_missing_program_is_an_error(cloud: StubbedAws, file: ClusterFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "rsync" else f"/bin/{name}")
    assert "apt-get install rsync" in only(file, "error")


def test_a_folder_too_large_to_upload_is_an_error(
    cloud: StubbedAws, file: ClusterFile, tune: Callable[[str, str], None]
) -> None:
    tune("cluster.ray", "working_dir_mib = 0")
    assert "into data/" in only(file, "error")


def test_calls_to_aws_run_in_parallel(cloud: StubbedAws, file: ClusterFile) -> None:
    """Each of these three calls waits until all three are in progress."""
    together = threading.Barrier(3, timeout=5)

    def wait_for_the_others(answer: Answer, asked: dict[str, Any]) -> Answer:
        together.wait()
        return answer

    cloud.answers["GetParameters"] = functools.partial(wait_for_the_others, {"Parameters": []})
    cloud.answers["DescribeInstances"] = functools.partial(wait_for_the_others, {"Reservations": []})
    cloud.answers["GetProducts"] = functools.partial(wait_for_the_others, {"PriceList": []})
    assert len(texts(checks.check(file), "error")) == 2


def test_the_permissions_cover_every_resource_type_in_the_stack() -> None:
    kinds = set(re.findall(r"Type: (AWS::\S+)", stack.TEMPLATE.read_text(encoding="utf-8")))
    assert kinds == set(CREATE_ACTIONS)
    assert set(CREATE_ACTIONS.values()) <= ALL_ACTIONS


def test_the_permissions_cover_every_call_of_up_and_down() -> None:
    models = {service: SESSION._session.get_service_model(service) for service in SERVICES}
    actions = {
        botocore.xform_name(operation): f"{model.signing_name}:{operation}"
        for model in models.values()
        for operation in model.operation_names
    }
    sources = [*settings.PROJECT.glob("raymill/aws/*.py"), *settings.PROJECT.glob("raymill/common/*.py")]
    assert sources
    for source in {*sources} - {settings.PROJECT / "raymill" / "aws" / "capacity_blocks.py"}:  # only `inv capacity`
        words = re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", source.read_text(encoding="utf-8"))
        called = {actions[word] for word in words if word in actions}
        assert called <= ALL_ACTIONS, source
