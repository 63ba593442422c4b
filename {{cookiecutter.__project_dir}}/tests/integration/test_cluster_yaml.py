"""Check cluster.yaml with the schemas of Ray and EC2, stack.yaml with CloudFormation's, and both with our own rules."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import botocore.session
import cfnlint.api
import cfnlint.decode
import jsonschema
import pytest
import yaml
from botocore.validate import ParamValidator
from ray import autoscaler

from raymill import settings
from raymill.aws import launcher_file
from raymill.node import state
from raymill.ray_support import gpu_section
from raymill.ray_support.private import cluster_launcher

FILE = settings.PROJECT / "cluster" / "cluster.yaml"
STACK = settings.PROJECT / "cluster" / "stack.yaml"
SCHEMA = json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
# The keys of `provider` that Ray's AWS provider reads. Ray's schema accepts any key, even a misspelled one.
PROVIDER_KEYS = {"type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips"} | {
    "use_external_head_ip",
    "key_pair",
    "security_group",
}


def load() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def stack() -> dict[str, Any]:
    """Return stack.yaml with CloudFormation's short forms, such as !Ref, expanded."""
    template, problems = cfnlint.decode.decode_str(STACK.read_text(encoding="utf-8"))
    assert not problems
    return json.loads(json.dumps(template))


def node_configs() -> list[Any]:
    """Return one test parameter per node type."""
    return [pytest.param(body["node_config"], id=name) for name, body in load()["available_node_types"].items()]


def variants() -> list[Any]:
    """Return one test parameter per YAML block of aws-variants.md, named after the heading above the block."""
    sections = (settings.PROJECT / "docs" / "aws-variants.md").read_text(encoding="utf-8").split("\n## ")[1:]
    found = [(section.splitlines()[0], re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)) for section in sections]
    return [pytest.param(yaml.safe_load(block), id=title) for title, blocks in found for block in blocks]


def merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    both = {key: merge(base[key], value) for key, value in overlay.items() if isinstance(base.get(key), dict)}
    return base | overlay | both


def ec2_problems(node_config: dict[str, Any]) -> str:
    """Return the problems that botocore finds in a node_config as parameters of RunInstances, or an empty string."""
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    assert shape
    return ParamValidator().validate(node_config | {"MinCount": 1, "MaxCount": 1}, shape).generate_report()


def test_ray_accepts_the_file() -> None:
    jsonschema.validate(load(), SCHEMA)
    cluster_launcher.validate(load())


def test_provider_has_no_mistyped_key() -> None:
    assert set(load()["provider"]) <= PROVIDER_KEYS


@pytest.mark.parametrize("node_config", node_configs())
def test_ec2_knows_every_key_and_type_of_an_instance(node_config: dict[str, Any]) -> None:
    assert ec2_problems(node_config) == ""


def test_the_ec2_check_finds_a_typo() -> None:
    mistyped = copy.deepcopy(load()["available_node_types"]["gpu-spot-1"]["node_config"])
    mistyped["InstanceMarketOptions"] = {"MarketTyp": "spot"}
    assert "MarketTyp" in ec2_problems(mistyped)


def test_the_head_does_no_work_and_is_on_demand() -> None:
    config = load()
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"]["CPU"] == 0
    assert "InstanceMarketOptions" not in head["node_config"]


def test_idle_workers_end() -> None:
    config = load()
    workers = [body for name, body in config["available_node_types"].items() if name != config["head_node_type"]]
    assert all(body["min_workers"] == 0 for body in workers)
    assert all(body["max_workers"] <= config["max_workers"] for body in workers)
    assert config["idle_timeout_minutes"] <= 10


def test_gpu_types_differ_only_in_market_and_zone() -> None:
    """For the same work, Ray may use any of these types, and tries spot types first."""
    types = {name: body for name, body in load()["available_node_types"].items() if name.startswith("gpu-")}
    assert {name.rpartition("-")[0] for name in types} == {"gpu-spot", "gpu-on-demand"}
    for name, body in types.items():
        spot, zone = name.startswith("gpu-spot"), name.rpartition("-")[2]
        assert ("InstanceMarketOptions" in body["node_config"]) == spot
        assert body["priority"] == (2 if spot else 1)
        assert body["labels"] == {"zone": zone, "market": "spot" if spot else "on-demand"}
        assert body["node_config"]["LaunchTemplate"]["LaunchTemplateName"].endswith(f"-gpu-{zone}")
    one = {"InstanceMarketOptions", "LaunchTemplate"}
    shapes = [{k: v for k, v in body["node_config"].items() if k not in one} for body in types.values()]
    assert all(shape == shapes[0] for shape in shapes)


def test_everything_that_the_file_names_is_in_the_stack() -> None:
    resources = [body["Properties"] for body in stack()["Resources"].values()]
    templates = {one["LaunchTemplateName"] for one in resources if "LaunchTemplateName" in one}
    region = load()["provider"]["region"]
    roles = {one["RoleName"]["Fn::Sub"].replace("${AWS::Region}", region) for one in resources if "RoleName" in one}
    for body in load()["available_node_types"].values():
        assert body["node_config"]["LaunchTemplate"]["LaunchTemplateName"] in templates
        assert body["node_config"]["IamInstanceProfile"]["Name"] in roles


def test_the_head_may_use_every_launch_template_of_a_worker() -> None:
    resources = stack()["Resources"]
    templates = {name for name, body in resources.items() if body["Type"] == "AWS::EC2::LaunchTemplate"}
    allowed = set(re.findall(r":launch-template/\$\{(\w+)\}", STACK.read_text(encoding="utf-8")))
    assert allowed == templates - {"Head"}


def test_cloudformation_accepts_the_stack() -> None:
    problems = cfnlint.api.lint(STACK.read_text(encoding="utf-8"), regions=[load()["provider"]["region"]])
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


@pytest.mark.parametrize("variant", variants())
def test_a_documented_variant_is_accepted_by_ray_and_ec2(variant: dict[str, Any]) -> None:
    merged = merge(load(), variant)
    jsonschema.validate(merged, SCHEMA)
    for body in merged["available_node_types"].values():
        assert ec2_problems(body["node_config"]) == ""


def test_ray_and_ec2_accept_the_node_types_of_several_instance_types(monkeypatch: pytest.MonkeyPatch) -> None:
    section = gpu_section.GpuSection(instance_types=("p5.48xlarge", "g6e.48xlarge"), serve_instance_type="g6e.xlarge")
    monkeypatch.setattr(gpu_section, "load", lambda: section)
    content = launcher_file.load().content
    jsonschema.validate(content, SCHEMA)
    cluster_launcher.validate(content)
    for body in content["available_node_types"].values():
        assert ec2_problems(body["node_config"]) == ""


def test_instances_are_terminated_and_not_stopped() -> None:
    assert load()["provider"]["cache_stopped_nodes"] is False


@pytest.mark.parametrize("node_config", node_configs())
def test_disks_are_encrypted_and_deleted_with_the_instance(node_config: dict[str, Any]) -> None:
    disks = [mapping["Ebs"] for mapping in node_config["BlockDeviceMappings"]]
    assert disks
    assert all(disk["Encrypted"] and disk["DeleteOnTermination"] and disk["VolumeType"] == "gp3" for disk in disks)
    assert all(disk["Throughput"] > 125 for disk in disks), "gp3's default would slow down the setup"
    assert node_config["InstanceInitiatedShutdownBehavior"] == "terminate"


@pytest.mark.parametrize("node_config", node_configs())
def test_an_instance_ends_itself_if_its_lease_is_not_renewed(node_config: dict[str, Any]) -> None:
    assert str(state.LEASE) in node_config["UserData"]
    assert "-lt 600 ] || shutdown" in node_config["UserData"]


def test_a_watchdog_guards_every_node() -> None:
    config = load()
    assert "raymill.node.watchdog head" in config["head_start_ray_commands"][-1]
    assert "raymill.node.watchdog worker" in config["worker_start_ray_commands"][-1]


def test_every_node_copies_its_logs_to_the_bucket() -> None:
    config = load()
    assert "raymill.node.log_shipping head" in config["head_start_ray_commands"][-2]
    assert "raymill.node.log_shipping worker" in config["worker_start_ray_commands"][-2]


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "raymill.serving.haproxy"],
        ["-c", "from raymill.node import head_status, log_shipping, watchdog, watchdog_head, watchdog_worker"],
        ["-S", "-c", "from raymill.node import nvme, unpack"],  # -S: they run before there are packages
    ],
)
def test_nodes_have_all_files_that_they_need(command: list[str], tmp_path: Path) -> None:
    for there, here in load()["file_mounts"].items():
        target = tmp_path / there.removeprefix("~/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(settings.PROJECT / here)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, *command], cwd=tmp_path / "project", env=outside, check=True)


def test_credentials_need_imdsv2() -> None:
    templates = [body for body in stack()["Resources"].values() if body["Type"] == "AWS::EC2::LaunchTemplate"]
    expected = {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1}
    assert templates
    assert all(one["Properties"]["LaunchTemplateData"]["MetadataOptions"] == expected for one in templates)


@pytest.mark.parametrize("node_config", node_configs())
def test_the_image_is_explicit(node_config: dict[str, Any]) -> None:
    assert node_config["ImageId"].startswith(("resolve:ssm:/aws/service/", "ami-"))


@pytest.mark.parametrize("node_config", node_configs())
def test_ray_makes_no_open_group_shared_role_or_shared_key(node_config: dict[str, Any]) -> None:
    """By default, Ray opens port 22 to the world, and clusters share one role per account and one key per region."""
    slug = load()["cluster_name"]
    assert node_config["LaunchTemplate"]["LaunchTemplateName"].startswith(f"{slug}-")
    assert node_config["IamInstanceProfile"]["Name"].startswith(f"{slug}-")
    assert node_config["KeyName"] == slug
    assert "ssh_private_key" in load()["auth"]
    assert "0.0.0.0/0" not in FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("node_config", node_configs())
def test_everything_that_costs_money_has_the_tag(node_config: dict[str, Any]) -> None:
    tags = {entry["ResourceType"]: entry["Tags"] for entry in node_config["TagSpecifications"]}
    expected = [{"Key": "ray-project", "Value": load()["cluster_name"]}]
    assert tags == {kind: expected for kind in ("instance", "volume", "network-interface")}


def test_only_the_head_may_start_instances() -> None:
    profiles = {
        name: body["node_config"]["IamInstanceProfile"]["Name"] for name, body in load()["available_node_types"].items()
    }
    assert [name for name, profile in profiles.items() if profile.endswith("-head")] == [load()["head_node_type"]]


def test_folders_on_the_fast_disk_are_made_after_its_mount() -> None:
    """A mount would hide earlier folders, and their content would fill the root disk."""
    first, *others = load()["setup_commands"]
    assert "python3 -m raymill.node.nvme && sudo install --directory" in first
    assert "install --directory" not in "".join(others)


def test_caches_and_checkpoints_are_on_folders_of_the_fast_disk() -> None:
    commands = "\n".join(load()["setup_commands"])
    made = re.search(r"install --directory --owner=ubuntu (.*)", commands)
    assert made
    assert set(re.findall(r"(?:HF_HOME|[^_]TMPDIR)=(\S+)", commands)) < set(made[1].split())
    assert all(folder.startswith("/opt/dlami/nvme/") for folder in made[1].split())


def test_every_node_runs_the_pins_with_the_token_and_no_open_dashboard() -> None:
    config = load()
    setup = "\n".join(config["setup_commands"])
    assert "requirements/cluster.txt" in setup
    assert "RAY_AUTH_MODE=token" in setup
    assert config["cluster_synced_files"] == ["~/.ray/auth_token"]
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][1]
    for local in config["file_mounts"].values():
        assert (settings.PROJECT / local).exists()
