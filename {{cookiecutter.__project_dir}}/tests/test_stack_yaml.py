"""Check stack.yaml with CloudFormation's schemas, and with rules that keep the account safe."""

import json
import re
from typing import Any

import cfnlint.api
import cfnlint.decode
import yaml

from raymill import settings

CLUSTER = yaml.safe_load((settings.PROJECT / "cluster" / "cluster.yaml").read_text(encoding="utf-8"))
STACK = settings.PROJECT / "cluster" / "stack.yaml"


def stack() -> dict[str, Any]:
    """Return stack.yaml with CloudFormation's short forms, such as !Ref, expanded."""
    template, problems = cfnlint.decode.decode_str(STACK.read_text(encoding="utf-8"))
    assert not problems
    return json.loads(json.dumps(template))


def test_everything_that_the_file_names_is_in_the_stack() -> None:
    resources = [body["Properties"] for body in stack()["Resources"].values()]
    templates = {one["LaunchTemplateName"] for one in resources if "LaunchTemplateName" in one}
    region = CLUSTER["provider"]["region"]
    roles = {one["RoleName"]["Fn::Sub"].replace("${AWS::Region}", region) for one in resources if "RoleName" in one}
    for body in CLUSTER["available_node_types"].values():
        assert body["node_config"]["LaunchTemplate"]["LaunchTemplateName"] in templates
        assert body["node_config"]["IamInstanceProfile"]["Name"] in roles


def test_the_head_may_use_every_launch_template_of_a_worker() -> None:
    resources = stack()["Resources"]
    templates = {name for name, body in resources.items() if body["Type"] == "AWS::EC2::LaunchTemplate"}
    allowed = set(re.findall(r":launch-template/\$\{(\w+)\}", STACK.read_text(encoding="utf-8")))
    assert allowed == templates - {"Head"}


def test_cloudformation_accepts_the_stack() -> None:
    problems = cfnlint.api.lint(STACK.read_text(encoding="utf-8"), regions=[CLUSTER["provider"]["region"]])
    # W1030: cfn-lint does not see that conditions exclude the use of a subnet's id that is empty
    assert [str(problem) for problem in problems if problem.rule.id != "W1030"] == []


def test_the_stack_admits_only_the_cluster_and_its_owner() -> None:
    resources = stack()["Resources"].values()
    always = [body for body in resources if body.get("Condition") != "HasHttps"]
    assert _openings(always) == [(22, 22, {"Ref": "Caller"})]
    (own,) = [body["Properties"] for body in always if body["Type"] == "AWS::EC2::SecurityGroupIngress"]
    assert own["SourceSecurityGroupId"] == own["GroupId"] == {"Fn::GetAtt": ["Group", "GroupId"]}
    assert "FromPort" not in own
    with_https = [body for body in resources if body.get("Condition") == "HasHttps"]
    assert _openings(with_https) == [(443, 443, {"Ref": "Clients"})]
    (to_head,) = [body["Properties"] for body in with_https if body["Type"] == "AWS::EC2::SecurityGroupIngress"]
    assert to_head["SourceSecurityGroupId"] == {"Fn::GetAtt": ["HttpsGroup", "GroupId"]}
    assert to_head["FromPort"] == to_head["ToPort"] == {"Ref": "ServePort"}
    ingress = [body["Properties"].get("SecurityGroupIngress", []) for body in resources]
    assert "0.0.0.0/0" not in str(ingress)


def test_efa_and_packages_may_leave_the_cluster() -> None:
    """EFA needs a rule from the group to itself. Such a rule replaces EC2's default, so both must be explicit."""
    group = stack()["Resources"]["Group"]["Properties"]
    assert [(rule["IpProtocol"], rule["CidrIp"]) for rule in group["SecurityGroupEgress"]] == [("-1", "0.0.0.0/0")]
    egress = stack()["Resources"]["GroupToItself"]["Properties"]
    assert egress["DestinationSecurityGroupId"] == egress["GroupId"] == {"Fn::GetAtt": ["Group", "GroupId"]}
    assert egress["IpProtocol"] == "-1"


def _openings(resources: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    rules = [rule for body in resources for rule in body["Properties"].get("SecurityGroupIngress", [])]
    return [(rule["FromPort"], rule["ToPort"], rule["CidrIp"]) for rule in rules]


def test_the_bucket_outlives_the_stack_and_is_private() -> None:
    (bucket,) = [body for body in stack()["Resources"].values() if body["Type"] == "AWS::S3::Bucket"]
    assert bucket["DeletionPolicy"] == "Retain"
    assert set(bucket["Properties"]["PublicAccessBlockConfiguration"].values()) == {True}
    assert bucket["Properties"]["BucketEncryption"]


def test_credentials_need_imdsv2() -> None:
    templates = [body for body in stack()["Resources"].values() if body["Type"] == "AWS::EC2::LaunchTemplate"]
    expected = {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1}
    assert templates
    assert all(one["Properties"]["LaunchTemplateData"]["MetadataOptions"] == expected for one in templates)
