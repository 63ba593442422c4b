"""The GPU node types of cluster.yaml, changed and copied as [cluster.gpu] of settings.toml says."""

from typing import Any

from raymill.common import gpu_types
from raymill.common.cluster_file import ClusterFile, NodeType
from raymill.ray_support import aws_sections

Bodies = dict[str, dict[str, Any]]
"""Node types of a cluster file, by name."""


def apply(file: ClusterFile) -> Bodies:
    """Return the file's node types with those for each instance type of [cluster.gpu].

    The preferred type for training replaces that of cluster.yaml. The others are copies of these node types. Ray and
    training runs try all zones and markets of a type before the next type. New ones come first, because the last node
    type of a file has the preferred type.
    """
    node_types = file.content["available_node_types"]
    training = [worker for worker in file.workers if worker.zone]
    section = aws_sections.load_gpu()
    names = section.instance_types or (gpu_types.in_cluster_yaml(file),)
    priorities = [worker.priority for worker in training] or [0]
    step = max(priorities) - min(priorities) + 1
    copies: Bodies = {}
    replaced: Bodies = {}
    for worker in training:
        body = node_types[worker.name]
        for rank, name in enumerate(reversed(names)):
            made = _with_type(body, name, worker.priority + rank * step)
            if name == names[0]:
                replaced[worker.name] = made
            else:
                copies[f"{worker.name}-{name}"] = made
        if section.serve_instance_type not in ("", *names):
            copies[_serve_name(worker)] = _for_serving(body, section.serve_instance_type, worker.priority - step)
    return copies | node_types | replaced


def keep_runs_on_one_type(node_types: Bodies) -> Bodies:
    """Return the node types with a label for the instance type, if training could run on several instance types."""
    zoned = {name for name, body in node_types.items() if "zone" in body.get("labels", {})}
    types = {name: node_types[name]["node_config"]["InstanceType"] for name in zoned}
    if len(set(types.values())) < 2:
        return node_types
    return {
        name: body | {"labels": body["labels"] | {"instance_type": types[name]}} if name in zoned else body
        for name, body in node_types.items()
    }


def _with_type(body: dict[str, Any], instance_type: str, priority: int) -> dict[str, Any]:
    config = body["node_config"] | {"InstanceType": instance_type}
    return body | {"priority": priority, "node_config": config}


def _for_serving(body: dict[str, Any], instance_type: str, priority: int) -> dict[str, Any]:
    """Return a node type with another label for the zone, so that training never uses it, and without EFA."""
    labels = {"serve_zone" if key == "zone" else key: value for key, value in body["labels"].items()}
    made = _with_type(body, instance_type, priority) | {"labels": labels}
    template = made["node_config"]["LaunchTemplate"]
    name = template["LaunchTemplateName"].replace("-gpu-", "-serve-")
    made["node_config"] |= {"LaunchTemplate": template | {"LaunchTemplateName": name}}
    return made


def _serve_name(worker: NodeType) -> str:
    return f"serve-{worker.name.removeprefix('gpu-')}"
