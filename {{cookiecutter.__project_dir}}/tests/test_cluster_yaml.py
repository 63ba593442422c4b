"""Check cluster.yaml with the schemas of Ray and EC2, and with rules that keep a cluster safe and cheap."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import botocore.session
import jsonschema
import pytest
import yaml
from botocore.validate import ParamValidator
from ray import autoscaler

from raymill import settings
from raymill.node import state
from raymill.ray_support.private import cluster_launcher

FILE = settings.PROJECT / "cluster" / "cluster.yaml"
SCHEMA = json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
# The keys of `provider` that Ray's AWS provider reads. Ray's schema accepts any key, even a misspelled one.
PROVIDER_KEYS = {"type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips"} | {
    "use_external_head_ip",
    "key_pair",
    "security_group",
}


def load() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def node_configs() -> list[Any]:
    """Return one test parameter per node type."""
    return [pytest.param(body["node_config"], id=name) for name, body in load()["available_node_types"].items()]


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
