"""cluster.yaml against Ray's own schema, against EC2's own model, and for what neither of them checks."""

import copy
import json
from pathlib import Path
from typing import Any

import botocore.session
import jsonschema
import pytest
import yaml
from botocore.validate import ParamValidator
from ray import autoscaler
from ray.autoscaler._private.util import prepare_config, validate_config

import settings

FILE = settings.PROJECT / "cluster" / "cluster.yaml"
SCHEMA = json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
# What Ray's AWS provider reads of `provider`: its schema lets any other key pass, and a typo with it.
PROVIDER_KEYS = {"type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips"} | {
    "use_external_head_ip",
    "key_pair",
    "security_group",
}


def load() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def node_configs() -> list[Any]:
    """One test parameter for each node type."""
    return [pytest.param(body["node_config"], id=name) for name, body in load()["available_node_types"].items()]


def ec2_problems(node_config: dict[str, Any]) -> str:
    """What botocore says of a node_config as the parameters of RunInstances; empty when nothing is wrong."""
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    assert shape
    return ParamValidator().validate(node_config | {"MinCount": 1, "MaxCount": 1}, shape).generate_report()


def test_ray_accepts_the_file() -> None:
    jsonschema.validate(load(), SCHEMA)
    validate_config(prepare_config(load()))


def test_provider_has_no_mistyped_key() -> None:
    assert set(load()["provider"]) <= PROVIDER_KEYS


@pytest.mark.parametrize("node_config", node_configs())
def test_ec2_knows_every_key_and_type_of_an_instance(node_config: dict[str, Any]) -> None:
    assert ec2_problems(node_config) == ""


def test_the_ec2_check_finds_a_typo() -> None:
    mistyped = copy.deepcopy(load()["available_node_types"]["a100"]["node_config"])
    mistyped["InstanceMarketOptions"] = {"MarketTyp": "spot"}
    assert "MarketTyp" in ec2_problems(mistyped)


def test_the_head_does_no_work_and_is_on_demand() -> None:
    config = load()
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"]["CPU"] == 0
    assert "InstanceMarketOptions" not in head["node_config"]


def test_workers_come_and_go() -> None:
    config = load()
    workers = [body for name, body in config["available_node_types"].items() if name != config["head_node_type"]]
    assert all(body["min_workers"] == 0 for body in workers)
    assert config["max_workers"] == sum(body["max_workers"] for body in workers)
    assert config["idle_timeout_minutes"] <= 10


def test_nothing_is_left_stopped() -> None:
    assert load()["provider"]["cache_stopped_nodes"] is False


@pytest.mark.parametrize("node_config", node_configs())
def test_disks_are_encrypted_and_go_with_the_instance(node_config: dict[str, Any]) -> None:
    disks = [mapping["Ebs"] for mapping in node_config["BlockDeviceMappings"]]
    assert disks
    assert all(disk["Encrypted"] and disk["DeleteOnTermination"] and disk["VolumeType"] == "gp3" for disk in disks)
    assert node_config["InstanceInitiatedShutdownBehavior"] == "terminate"


@pytest.mark.parametrize("node_config", node_configs())
def test_credentials_need_imdsv2(node_config: dict[str, Any]) -> None:
    assert node_config["MetadataOptions"] == {
        "HttpEndpoint": "enabled",
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": 1,
    }


@pytest.mark.parametrize("node_config", node_configs())
def test_the_image_is_explicit(node_config: dict[str, Any]) -> None:
    assert node_config["ImageId"].startswith(("resolve:ssm:/aws/service/", "ami-"))


@pytest.mark.parametrize("node_config", node_configs())
def test_ray_makes_no_open_group_shared_role_or_shared_key(node_config: dict[str, Any]) -> None:
    """Ray's own security group is open to the world on port 22; its role and key serve the whole account."""
    slug = load()["cluster_name"]
    assert node_config.get("SecurityGroupIds") or node_config["LaunchTemplate"]["LaunchTemplateName"] == slug
    assert node_config["IamInstanceProfile"]["Name"].startswith(f"{slug}-")
    assert node_config["KeyName"] == slug
    assert "ssh_private_key" in load()["auth"]
    assert "0.0.0.0/0" not in FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("node_config", node_configs())
def test_all_that_costs_carries_the_tag(node_config: dict[str, Any]) -> None:
    tags = {entry["ResourceType"]: entry["Tags"] for entry in node_config["TagSpecifications"]}
    expected = [{"Key": "project", "Value": load()["cluster_name"]}]
    assert tags == {kind: expected for kind in ("instance", "volume", "network-interface")}


def test_only_the_head_may_start_instances() -> None:
    profiles = {
        name: body["node_config"]["IamInstanceProfile"]["Name"] for name, body in load()["available_node_types"].items()
    }
    assert [name for name, profile in profiles.items() if profile.endswith("-head")] == [load()["head_node_type"]]


def test_every_node_runs_the_pins_with_the_token_and_no_open_dashboard() -> None:
    config = load()
    setup = "\n".join(config["setup_commands"])
    assert "requirements/cluster.txt" in setup
    assert "RAY_AUTH_MODE=token" in setup
    assert config["cluster_synced_files"] == ["~/.ray/auth_token"]
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]
    for local in config["file_mounts"].values():
        assert (settings.PROJECT / local).exists()
