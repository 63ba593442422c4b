"""The image from which all instances of a cluster start.

cluster.yaml names a parameter whose value is AWS's latest image. The value changes every few weeks, so a cluster keeps
the image that its head started from. Otherwise, later workers could get another driver than earlier ones.
"""

import dataclasses
from typing import Any

from raymill.common.cluster_file import ClusterFile
from raymill.common.instances import Instance
from raymill.errors import UserError

PARAMETER = "resolve:ssm:"
"""EC2's prefix for the name of a parameter in place of an image's id."""


def keep(file: ClusterFile, running_head: Instance | None) -> ClusterFile:
    """Return the file with the ids of images in place of parameters: the running head's image, or else the latest.

    Raises:
        UserError: AWS has no such parameter in this region.
    """
    types = file.content["available_node_types"]
    names = {body["node_config"].get("ImageId", "") for body in types.values()}
    kept_image = {file.head.node_config.get("ImageId", ""): running_head.image} if running_head else {}
    images = {name: kept_image.get(name) or _require(file, name) for name in names if name.startswith(PARAMETER)}
    kept = {name: body | {"node_config": _with_image(body["node_config"], images)} for name, body in types.items()}
    return dataclasses.replace(file, content=file.content | {"available_node_types": kept})


def latest(file: ClusterFile, parameter: str) -> str | None:
    """Return the id of the image that "resolve:ssm:NAME" stands for now, or None if the region lacks the parameter."""
    found = file.client("ssm").get_parameters(Names=[parameter.removeprefix(PARAMETER)])["Parameters"]
    return found[0]["Value"] if found else None


def _require(file: ClusterFile, parameter: str) -> str:
    if image := latest(file, parameter):
        return image
    raise UserError(
        f"AWS has no parameter {parameter.removeprefix(PARAMETER)} in {file.region}. "
        "Set another ImageId in cluster/cluster.yaml"
    )


def _with_image(node_config: dict[str, Any], images: dict[str, str]) -> dict[str, Any]:
    image = node_config.get("ImageId", "")
    return node_config | {"ImageId": images[image]} if image in images else node_config
