"""Check the variants of cluster.yaml that the code or the documentation makes. A project's own tests check the file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import botocore.session
import jsonschema
import pytest
import yaml
from botocore.validate import ParamValidator
from ray import autoscaler

from raymill import settings
from raymill.aws import launcher_file
from raymill.ray_support import aws_sections
from raymill.ray_support.private import cluster_launcher

FILE = settings.PROJECT / "cluster" / "cluster.yaml"
SCHEMA = json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))


def load() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


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


@pytest.mark.parametrize("variant", variants())
def test_a_documented_variant_is_accepted_by_ray_and_ec2(variant: dict[str, Any]) -> None:
    merged = merge(load(), variant)
    jsonschema.validate(merged, SCHEMA)
    for body in merged["available_node_types"].values():
        assert ec2_problems(body["node_config"]) == ""


def test_ray_and_ec2_accept_the_node_types_of_several_instance_types(monkeypatch: pytest.MonkeyPatch) -> None:
    section = aws_sections.GpuSection(instance_types=("p5.48xlarge", "g6e.48xlarge"), serve_instance_type="g6e.xlarge")
    monkeypatch.setattr(aws_sections, "load_gpu", lambda: section)
    content = launcher_file.load().content
    jsonschema.validate(content, SCHEMA)
    cluster_launcher.validate(content)
    for body in content["available_node_types"].values():
        assert ec2_problems(body["node_config"]) == ""


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
